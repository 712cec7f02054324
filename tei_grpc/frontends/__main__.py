"""`python -m tei_grpc.frontends` is a front-end. Only a server starts it, and tells it all on stdin."""

import signal
import sys

# a terminal and some supervisors send signals to children, too; a front-end ends when its server says so, or is gone
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)

from tei_grpc.frontends.process import main  # noqa: E402 - it takes a while to import

sys.exit(main())
