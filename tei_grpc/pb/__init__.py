"""Generated from proto/tei.proto by `make proto`; nothing else lives here."""
