"""A client for text-embedding servers behind the `tei.v1` gRPC contract."""

from tei_client.async_client import AsyncClient
from tei_client.channel import TlsOptions
from tei_client.client import Client
from tei_client.errors import InvalidInputError, TeiClientError
from tei_client.retry import RetryPolicy
from tei_client.types import Prediction, Rank, ServerInfo, SparseVector, Token

__version__ = "0.1.0"

__all__ = [
    "AsyncClient",
    "Client",
    "InvalidInputError",
    "Prediction",
    "Rank",
    "RetryPolicy",
    "ServerInfo",
    "SparseVector",
    "TeiClientError",
    "TlsOptions",
    "Token",
]
