"""The Go example, built from the committed stubs, against the real server."""

import asyncio
import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from tests.grpc.conftest import serve_fake, write_checkpoint

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "scripts" / "build_go_client.sh"
PACKAGES = Path("/usr/share/gocode/src/google.golang.org")


def skip_without(found: bool, what: str) -> None:
    if not found:
        reason = f"{what} missing: clients/go/README.md names the packages"
        pytest.fail(reason) if os.environ.get("CI") == "true" else pytest.skip(reason)


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> Path:
    skip_without(shutil.which("go") is not None and PACKAGES.is_dir(), "Go or its gRPC packages are")
    program = tmp_path_factory.mktemp("go") / "example"
    subprocess.run([BUILD, "build", program], check=True)
    return program


async def run(program: Path, *arguments: str) -> tuple[int | None, list[str]]:
    process = await asyncio.create_subprocess_exec(
        program, *arguments, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
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


def test_stubs_are_those_of_the_contract():
    skip_without(
        all(map(shutil.which, ("protoc", "protoc-gen-go", "protoc-gen-go-grpc"))), "protoc or its Go plugins are"
    )
    subprocess.run([BUILD, "check"], check=True)
