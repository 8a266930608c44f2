"""What all programs share about the wire: errors, names, times, endpoints, channels, and the values behind messages."""
