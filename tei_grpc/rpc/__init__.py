"""gRPC plumbing."""
