"""A gRPC server for text-embedding models behind the `tei.v1` contract."""

import os
from typing import Final

__version__ = "0.1.0"

GIT_SHA: Final = os.environ.get("TEI_GRPC_GIT_SHA") or None  # set by the image's build arguments
