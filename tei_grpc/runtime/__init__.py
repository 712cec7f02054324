"""What front doors share: addresses, signals, and the end of a server."""
