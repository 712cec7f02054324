"""`python -m tei_grpc` is `tei-grpc`."""

import sys

from tei_grpc.cli import main

sys.exit(main())
