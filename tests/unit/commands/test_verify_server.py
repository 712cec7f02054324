"""`tei-grpc verify --address` asks a running server."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tei_grpc import cli
from tei_grpc.config import Settings
from tei_grpc.engine.engine import Engine
from tei_grpc.serve.grpc_server import GrpcServer
from tests.checkpoints import make_checkpoint
from tests.e2e.servers import free_port

KEY = "secret"


@asynccontextmanager
async def serve(folder: Path, **options: object) -> AsyncIterator[str]:
    """The address of a server with its model loaded."""
    settings = Settings(model_id=str(folder), hostname="127.0.0.1", port=0, api_key=KEY, **options)
    engine = Engine(settings)
    server = GrpcServer(settings, engine)
    addresses = await server.start()
    try:
        await engine.start()
        yield addresses.serving[0].local
    finally:
        await server.stop()
        await engine.stop()


async def verify(*argv: object) -> int:
    return await asyncio.to_thread(cli.main, ["verify", *map(str, argv)])


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("bert-mean", {}),
        ("bert-one-label", {"max_client_batch_size": 10}),
        ("bert-three-labels", {}),
        ("bert-masked-lm", {"pooling": "splade"}),
        ("bert-mean", {"force_generic": True, "dtype": "bfloat16"}),
    ],
)
async def test_server_agrees_with_the_reference(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, options: dict[str, object]
) -> None:
    folder = make_checkpoint(name, tmp_path)
    pooling = ["--pooling", "splade"] if "pooling" in options else []
    async with serve(folder, **options) as address:
        code = await verify(folder, "--address", address, "--api-key", KEY, "--json", *pooling)
    found = json.loads(capsys.readouterr().out)
    assert (code, found["failures"]) == (0, [])
    assert found["ours"]["dtype"] == options.get("dtype", "float32")
    assert found["ours"]["path"] == ("generic" if "force_generic" in options else "packed")


async def test_server_of_another_model_is_found_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    served = make_checkpoint("bert-mean", tmp_path / "served", seed=1)
    expected = make_checkpoint("bert-mean", tmp_path / "expected")
    async with serve(served) as address:
        assert await verify(expected, "--address", address, "--api-key", KEY) == 1
    assert "FAIL: largest difference, cosine" in capsys.readouterr().out


async def test_server_that_wants_a_key_is_no_difference(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_checkpoint("bert-mean", tmp_path)
    async with serve(folder) as address:
        assert await verify(folder, "--address", address, "--api-key", "wrong") == 3
    assert "UNAUTHENTICATED" in capsys.readouterr().err


async def test_server_that_is_not_there_is_no_difference(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    address = f"127.0.0.1:{free_port()}"
    assert await verify(make_checkpoint("bert-mean", tmp_path), "--address", address) == 3
    assert f"{address}: UNAVAILABLE" in capsys.readouterr().err
