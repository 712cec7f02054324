"""The real Envoy, with the configuration that we publish."""

import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from tests.e2e.servers import free_port

CONFIG = Path(__file__).resolve().parents[2] / "deploy" / "envoy" / "envoy.yaml"
ENVOY = str(Path(sys.executable).with_name("envoy"))
TLS_MARK = "#| "
PATIENCE = 60  # seconds


def validate(file: Path) -> str:
    """Let Envoy read a configuration without running it; what it complains of, empty when it does not."""
    run = subprocess.run([ENVOY, "--mode", "validate", "-c", file], capture_output=True, text=True, timeout=PATIENCE)
    return "" if run.returncode == 0 else run.stdout + run.stderr


class Envoy:
    """A running Envoy: where it listens, and what it thinks of the servers behind it."""

    def __init__(self, folder: Path, servers: Sequence[int]) -> None:
        self.port, self._admin = free_port(), free_port()
        self.address = f"127.0.0.1:{self.port}"
        file, log = folder / "envoy.yaml", folder / "envoy.log"
        file.write_text(yaml.safe_dump(self._localize(servers)))
        options = ["--concurrency", "2", "--disable-hot-restart", "--log-path", str(log)]
        self.process = subprocess.Popen([ENVOY, "-c", str(file), *options], stderr=subprocess.DEVNULL)

    def wait_until_well(self, servers: int) -> None:
        """Wait until it counts so many servers as healthy."""
        ends = time.monotonic() + PATIENCE
        while time.monotonic() < ends:
            if self._read_stat("cluster.tei.membership_healthy") == servers:
                return
            time.sleep(0.05)
        raise TimeoutError(f"Envoy does not find {servers} servers well")

    def _read_stat(self, name: str) -> int | None:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self._admin}/stats?filter=^{name}$", timeout=10) as reply:
                return int(reply.read().decode().rpartition(":")[2])
        except (OSError, ValueError):  # not up yet
            return None

    def _localize(self, servers: Sequence[int]) -> dict[str, Any]:
        """The published configuration, with ports of this machine."""
        config: dict[str, Any] = yaml.safe_load(CONFIG.read_text())
        (listener,), (cluster,) = config["static_resources"]["listeners"], config["static_resources"]["clusters"]
        listener["address"] = _address(self.port)
        config["admin"]["address"] = _address(self._admin)
        endpoints = [{"endpoint": {"address": _address(port)}} for port in servers]
        cluster["load_assignment"]["endpoints"] = [{"lb_endpoints": endpoints}]
        return config


@contextmanager
def running_envoy(folder: Path, servers: Sequence[int]) -> Iterator[Envoy]:
    """Envoy in front of servers on these ports, ended with the block."""
    envoy = Envoy(folder, servers)
    try:
        yield envoy
    finally:
        envoy.process.kill()
        envoy.process.wait()


def _address(port: int) -> dict[str, Any]:
    return {"socket_address": {"address": "127.0.0.1", "port_value": port}}
