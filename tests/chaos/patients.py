"""A server under abuse, and how one sees whether it is well."""

import tempfile
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import psutil
from prometheus_client.parser import text_string_to_metric_families

from tei_grpc.pb import tei_pb2
from tests.chaos.attacks import CREDENTIALS, KEY
from tests.checkpoints import make_checkpoint
from tests.e2e.servers import Server, free_port

PERMITS = 16
# grpc.aio's own, when a caller leaves in the moment in which its answer is sent
CALLER_LEFT = "ExecuteBatchError raised in core"
SIGNS_OF_A_BUG = ("Traceback", "never retrieved", "never awaited", "was destroyed", "Internal error, id")

ROWS = {
    "bert-t": ("Embed/Embed", tei_pb2.EmbedRequest(inputs="hello world"), tei_pb2.EmbedResponse),
    "ce-t": ("Predict/Predict", tei_pb2.PredictRequest(inputs="hello world"), tei_pb2.PredictResponse),
    "mlm-t": ("Embed/EmbedSparse", tei_pb2.EmbedSparseRequest(inputs="hello world"), tei_pb2.EmbedSparseResponse),
}


class Patient:
    """A server under abuse, and what is known of its health."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self._method, self._request, self._reply = ROWS[name]
        self._metrics_port = free_port()
        self._server = Server(
            *("--model-id", str(make_checkpoint(name, folder)), "--api-key", KEY),
            *("--max-concurrent-requests", str(PERMITS), "--prometheus-port", str(self._metrics_port)),
            *(("--pooling", "splade") if name == "mlm-t" else ()),
            OMP_NUM_THREADS="1",
        )

        self.address = self._server.address

    def wait_until_ready(self) -> None:
        """Wait for the model."""
        self._server.wait_until_ready()
        self._process = psutil.Process(self._server.process.pid)

    def kill(self) -> None:
        self._server.kill()

    @property
    def is_alive(self) -> bool:
        return self._server.process.poll() is None

    @property
    def memory(self) -> int:
        """Bytes in memory."""
        rss: int = self._process.memory_info().rss
        return rss

    @property
    def descriptors(self) -> int:
        """Open files and connections."""
        count: int = self._process.num_fds()
        return count

    async def probe(self, channel: grpc.aio.Channel, *, waits: bool = False) -> bytes:
        """The answer to a fixed question, without what it cost; as a message of a stream it waits for a permit."""
        method = f"/tei.v1.{self._method}" + ("Stream" if waits else "")
        call = channel.stream_stream(method)(metadata=CREDENTIALS, timeout=30)
        await call.write(self._request.SerializeToString())
        await call.done_writing()
        raw = await call.read()
        if await call.code() is not grpc.StatusCode.OK:
            raise grpc.RpcError(await call.details())
        reply = self._reply.FromString(raw)
        reply.ClearField("metadata")
        found: bytes = reply.SerializeToString(deterministic=True)
        return found

    def read_metrics(self) -> dict[str, float]:
        """Sums of all samples by name."""
        return read_metrics(self._metrics_port)

    def complaints(self) -> list[str]:
        """Lines of the log that only a bug writes."""
        lines = [line for line in self._server.lines if CALLER_LEFT not in line]
        return [line for line in lines if any(sign in line for sign in SIGNS_OF_A_BUG)]


def read_metrics(port: int) -> dict[str, float]:
    """Sums of all samples by name."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=10) as response:
        families = text_string_to_metric_families(response.read().decode())
        sums: Counter[str] = Counter()
        for family in families:
            for sample in family.samples:
                sums[sample.name.removesuffix("_total")] += sample.value
        return dict(sums)


@contextmanager
def patients() -> Iterator[list[Patient]]:
    """All servers, ready."""
    with tempfile.TemporaryDirectory() as folder:
        started = [Patient(name, Path(folder) / name) for name in ROWS]
        try:
            for patient in started:
                patient.wait_until_ready()
            yield started
        finally:
            for patient in started:
                patient.kill()
