"""The Go example, built from the committed stubs, against the real server."""

import asyncio
import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from tei_grpc.pb import tei_pb2
from tests.clients.names import serve_names
from tests.e2e.servers import free_port
from tests.grpc.conftest import serve_fake, until, write_checkpoint
from tests.needs import need

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "scripts" / "build_go_client.sh"
PACKAGES = Path("/usr/share/gocode/src/google.golang.org")
MISSING = "missing: clients/go/README.md names the packages"


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> Path:
    need(shutil.which("go") and PACKAGES.is_dir(), f"Go or its gRPC packages are {MISSING}")
    program = tmp_path_factory.mktemp("go") / "example"
    subprocess.run([BUILD, "build", program], check=True)
    return program


async def run(program: Path, *arguments: str) -> tuple[int | None, list[str]]:
    process = await asyncio.create_subprocess_exec(
        program,
        *arguments,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env={**os.environ, "GRPC_GO_RETRY": "on"},  # Debian's grpc-go is older than 1.40
    )
    output, _ = await asyncio.wait_for(process.communicate(), 60)
    return process.returncode, output.decode().splitlines()


async def test_health_vectors_and_a_refusal_are_printed(served, example):
    served.runner.answer = lambda entry: (np.array([3, 4] if len(entry) == 3 else [4, 3], np.float32),)
    code, lines = await run(example, served.address, "w0", "w1 w2")
    assert lines == [
        "health: SERVING",
        "embed: 2 values [0.6 0.8]",
        "stream: 0 2 values [0.6 0.8]",
        "stream: 1 2 values [0.8 0.6]",
        "rerank: FailedPrecondition model is not a classifier model",
    ]
    assert code == 0


async def test_refused_text_is_named(served, example):
    code, lines = await run(example, served.address, "w0", "w1", "")
    assert lines[-1].endswith(
        "text 2: rpc error: code = InvalidArgument desc = Input validation error: `inputs` cannot be empty"
    )
    assert code == 1


async def test_key_opens_the_server(tmp_path, example):
    async with serve_fake(write_checkpoint(tmp_path, "BertModel"), api_key="secret") as served:
        assert (await run(example, "-api-key", "secret", served.address, "w0"))[0] == 0
        code, lines = await run(example, served.address, "w0")
    assert (code, lines[0]) == (1, "health: SERVING")
    assert "code = Unauthenticated desc = No valid auth token" in lines[-1]


async def test_overload_that_passes_is_not_seen(tmp_path, example):
    async with serve_fake(write_checkpoint(tmp_path, "BertModel"), max_concurrent_requests=1) as served:
        served.runner.gate.clear()
        holding = served.embed.Embed(tei_pb2.EmbedRequest(inputs="w0"))
        await asyncio.to_thread(served.runner.running.wait)
        running = asyncio.create_task(run(example, served.address, "w0"))
        await until(lambda: 'err="overloaded"' in served.engine.metrics.render().decode())
        served.runner.gate.set()
        assert (await running)[0] == 0
        await holding


async def test_calls_go_to_whichever_server_of_a_name_serves(tmp_path, example):
    port, model = free_port(), write_checkpoint(tmp_path, "BertModel")
    async with (
        serve_fake(model, hostname="127.0.0.1", port=port, load=False) as loading,
        serve_fake(model, hostname="127.0.0.2", port=port) as serving,
        serve_names(port) as names,
    ):
        names.addresses = ["127.0.0.1", "127.0.0.2"]
        assert (await run(example, names.target, "w0", "w1"))[0] == 0
        assert serving.runner.batches
        assert not loading.runner.batches


def test_stubs_are_those_of_the_contract():
    tools = all(map(shutil.which, ("protoc", "protoc-gen-go", "protoc-gen-go-grpc")))
    need(tools, f"protoc or its Go plugins are {MISSING}")
    subprocess.run([BUILD, "check"], check=True)
