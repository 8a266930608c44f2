"""The services on the wire: parse, call the writer or read what is durable, answer. Nothing is decided here."""
