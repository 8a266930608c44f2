"""What Prometheus reads of a master: sums over what it knows, and what it counted. Loaded only where that is asked
for."""
