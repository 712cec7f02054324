"""A gRPC server for text-embedding models behind the `tei.v1` contract.

The Python API is the engine itself:
`async with Engine(EngineConfig(model_id=...)) as engine: await engine.embed("text")`.
"""

import os
from importlib import import_module
from typing import Any, Final

__version__ = "0.1.0"

GIT_SHA: Final = os.environ.get("TEI_GRPC_GIT_SHA") or None  # set by the image's build arguments

# imported when they are asked for: a process that only needs the stubs or the version loads nothing else
_PUBLIC = {
    "Caller": "tei_grpc.types",
    "Engine": "tei_grpc.engine.engine",
    "EngineConfig": "tei_grpc.config",
    "Input": "tei_grpc.types",
    "Scoring": "tei_grpc.types",
    "TeiError": "tei_grpc.errors",
}

__all__ = ["__version__", *_PUBLIC]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_PUBLIC[name]), name)
