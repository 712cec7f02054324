"""Generated from proto/tei.proto; `make proto` writes it. Messages and stubs for what the client does not cover."""
