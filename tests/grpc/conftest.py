"""A real server on a live socket around the real engine; only the model is weightless."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from tei_grpc.config import Settings
from tei_grpc.engine.engine import Engine
from tei_grpc.loading.model_config import read_model_config
from tei_grpc.metrics import Metrics
from tei_grpc.pb import tei_pb2_grpc
from tei_grpc.runtime.listeners import Addresses
from tei_grpc.serve.grpc_server import GrpcServer
from tei_grpc.traces import open_traces
from tei_grpc.traces.recorder import Traces
from tests.fakes import FakeDevice, FakeRunner

WORDS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", *(f"w{i}" for i in range(200)))


@dataclass
class Served:
    """A running server and ways to reach it."""

    server: GrpcServer
    engine: Engine
    runner: FakeRunner
    device: FakeDevice
    address: str
    addresses: Addresses
    channel: grpc.aio.Channel
    traces: Traces | None

    @property
    def embed(self) -> tei_pb2_grpc.EmbedStub:
        return tei_pb2_grpc.EmbedStub(self.channel)


async def until(condition: Callable[[], bool]) -> None:
    """Wait for what the server does on its own; there is no event to wait for."""
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.001)


Serve = Callable[..., AbstractAsyncContextManager[Served]]


def write_checkpoint(folder: Path, *architectures: str, **config: object) -> Path:
    """A checkpoint without weights: words w0 ... w199 are tokens 4 ... 203."""
    tokenizer = Tokenizer(models.WordLevel({word: id for id, word in enumerate(WORDS)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    tokenizer.add_special_tokens(list(WORDS[:4]))
    tokenizer.save(str(folder / "tokenizer.json"))
    bert = {"model_type": "bert", "vocab_size": len(WORDS), "max_position_embeddings": 512}
    config = {**bert, "architectures": architectures, **config}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
def embedding_model(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path, "BertModel")


@asynccontextmanager
async def serve_fake(model: Path, *, load: bool = True, **options: object) -> AsyncIterator[Served]:
    """Serve a checkpoint by a FakeRunner, on a free port of the loopback."""
    defaults = {"hostname": "127.0.0.1", "port": 0, "shutdown_grace": 0.5}
    settings = Settings.model_validate({"model_id": str(model), **defaults, **options})
    metrics, traces = Metrics(), open_traces(settings)
    device = FakeDevice(read_model_config(model, settings), settings, metrics, FakeRunner())
    engine = Engine(settings, device, metrics, traces)
    server = GrpcServer(settings, engine)
    addresses = await server.start()
    address = addresses.serving[0].local
    try:
        if load:
            await engine.start()
        async with grpc.aio.insecure_channel(address) as channel:
            yield Served(server, engine, device.runner, device, address, addresses, channel, traces)
    finally:
        device.runner.gate.set()
        await server.stop()
        if traces is not None:
            await asyncio.to_thread(traces.close)


@pytest.fixture
def serve(embedding_model: Path) -> Iterator[Serve]:
    def start(**options: object) -> AbstractAsyncContextManager[Served]:
        return serve_fake(embedding_model, **options)

    yield start


@pytest.fixture
async def served(serve: Serve) -> AsyncIterator[Served]:
    async with serve() as running:
        yield running
