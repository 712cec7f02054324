"""The line that a request walks; knows nothing of gRPC."""
