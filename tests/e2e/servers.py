"""A server as its users start it: a process of its own, spoken to over a socket."""

import os
import socket
import subprocess
import sys
import threading
from pathlib import Path
from queue import Queue
from typing import Self

import pytest

from tei_grpc.config import Settings

START_SECONDS = 120  # loading torch on a busy machine
TEI_GRPC = str(Path(sys.executable).with_name("tei-grpc"))


def clean_environment() -> dict[str, str]:
    """Return the environment without options, so that only the test decides."""
    options = {name.upper() for name in Settings.model_fields}
    return {name: value for name, value in os.environ.items() if name not in options}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Server:
    """`tei-grpc` with JSON logs, started in `folder`; every line that it prints is kept in `lines`."""

    def __init__(self, *options: str, port: int | None = None, folder: Path | None = None, **environment: str) -> None:
        self.port = free_port() if port is None else port
        self.address = f"127.0.0.1:{self.port}"
        self.lines: list[str] = []
        self._unread: Queue[str] = Queue()
        listen = ["--hostname", "127.0.0.1", "--port", str(self.port), "--json-output", "--prometheus-port", "0"]
        self.process = subprocess.Popen(
            [TEI_GRPC, *listen, *options],
            cwd=folder,
            env=clean_environment() | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as output:
            for line in output:
                self.lines.append(line)
                self._unread.put(line)
        self._unread.put("")

    def next_line(self) -> str:
        """Return the next line of output; empty once the process has ended."""
        return self._unread.get(timeout=START_SECONDS)

    def wait_until_ready(self) -> Self:
        """Wait until the log says that the server serves."""
        while f"Serving on {self.address}" not in (line := self.next_line()):
            if not line:
                pytest.fail(f"the server ended with {self.process.wait()}: {''.join(self.lines)}")
        return self

    def wait(self) -> int:
        """Return the exit code, once all output is in `lines`."""
        code = self.process.wait(timeout=START_SECONDS)
        self._reader.join()
        return code

    def terminate(self) -> int:
        """Send SIGTERM and return the exit code."""
        self.process.terminate()
        return self.wait()

    def kill(self) -> None:
        """End it without asking."""
        self.process.kill()
        self.wait()
