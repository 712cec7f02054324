"""A gRPC server for text-embedding models behind the `tei.v1` contract."""

__version__ = "0.1.0"
