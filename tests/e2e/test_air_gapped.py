"""From a machine with a hub to one without, by the commands of docs/operations.md; the hub is a stand-in."""

import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import grpc
import numpy as np
import pytest

from tei_grpc.config import EngineConfig
from tei_grpc.engine.engine import Engine
from tei_grpc.pb import tei_pb2, tei_pb2_grpc
from tests.checkpoints import bert_t
from tests.deploy.manifests import ROOT
from tests.e2e.servers import Server, clean_environment
from tests.hub import COMMIT, Hub, serve

BIN = Path(sys.executable).parent
SECTION = (ROOT / "docs" / "operations.md").read_text().partition("\n## Air-gapped\n")[2].partition("\n## ")[0]
BLOCKS = [block.splitlines() for block in re.findall(r"^```sh\n(.*?)^```$", SECTION, re.DOTALL | re.MULTILINE)]
(GET_CACHE, GET_DIRECTORY, CARRY), (SERVE_CACHE, SERVE_DIRECTORY) = BLOCKS
REPO = shlex.split(GET_CACHE)[2]
DIRECTORY = shlex.split(GET_DIRECTORY, comments=True)[-1]
CACHED = f"models/models--{REPO.replace('/', '--')}/snapshots/{COMMIT}"
SSH = """#!/bin/sh
shift
cd "$HERE" && exec "$@"
"""
TEXT = "hello world"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return bert_t(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="module")
def hub(checkpoint: Path) -> Iterator[Hub]:
    files = {str(file.relative_to(checkpoint)): file.read_bytes() for file in checkpoint.rglob("*") if file.is_file()}
    with serve(Hub(REPO, files)) as hub:
        yield hub


def bring(hub: Hub, folder: Path, *commands: str) -> Path:
    """What one does where there is a hub, in a folder that is gone afterwards; where `ssh` has led to."""
    there, here, ssh = folder / "there", folder / "here", folder / "bin" / "ssh"
    for place in (there, here, ssh.parent):
        place.mkdir()
    ssh.write_text(SSH)
    ssh.chmod(0o755)
    switches = {"HF_ENDPOINT": hub.endpoint, "HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_DISABLE_UPDATE_CHECK": "1"}
    path = {"PATH": f"{ssh.parent}:{BIN}:{os.environ['PATH']}", "HERE": str(here)}
    script = ["bash", "-eo", "pipefail", "-c", "\n".join(commands)]
    environment = clean_environment() | switches | path
    run = subprocess.run(script, cwd=there, env=environment, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    shutil.rmtree(there)
    return here


def start(command: str, folder: Path, **environment: str) -> Server:
    """A line that starts a server."""
    words = shlex.split(command)
    program = words.index("tei-grpc")
    variables = dict(word.split("=", 1) for word in words[:program])
    return Server(*words[program + 1 :], folder=folder, OMP_NUM_THREADS="1", **variables, **environment)


async def embed(folder: Path) -> tuple[np.ndarray, str | None]:
    """A vector, and the commit that Info names."""
    async with Engine(EngineConfig(model_id=str(folder))) as engine:
        return (await engine.embed(TEXT)).embeddings, engine.info.model_sha


@pytest.fixture
def cache(hub: Hub, tmp_path: Path) -> Path:
    """Where a cache was carried to: there is no hub."""
    return bring(hub, tmp_path, GET_CACHE, CARRY)


async def test_carried_cache_is_served_by_the_models_name(cache: Path, checkpoint: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as nobody:  # whoever connects is seen, and never answered
        endpoint = f"http://127.0.0.1:{nobody.getsockname()[1]}"
        server = start(SERVE_CACHE, cache, HF_ENDPOINT=endpoint)
        try:
            server.wait_until_ready()
            async with grpc.aio.insecure_channel(server.address) as channel:
                reply = await tei_pb2_grpc.EmbedStub(channel).Embed(tei_pb2.EmbedRequest(inputs=TEXT))
                info = await tei_pb2_grpc.InfoStub(channel).Info(tei_pb2.InfoRequest())
        finally:
            server.kill()
        nobody.setblocking(False)
        with pytest.raises(BlockingIOError):
            nobody.accept()
    expected, _ = await embed(checkpoint)
    np.testing.assert_allclose(reply.embeddings, expected, atol=1e-6, rtol=0)
    assert (info.model_id, info.model_sha) == (REPO, COMMIT)


async def test_snapshot_of_a_carried_cache_is_served_by_its_path(cache: Path, checkpoint: Path) -> None:
    snapshot = cache / CACHED
    assert (snapshot / "model.safetensors").is_symlink()
    vector, commit = await embed(snapshot)
    np.testing.assert_array_equal(vector, (await embed(checkpoint))[0])
    assert commit == COMMIT


async def test_plain_directory_is_served(hub: Hub, checkpoint: Path, tmp_path: Path) -> None:
    here = bring(hub, tmp_path, GET_DIRECTORY, CARRY.replace("models", DIRECTORY))
    assert not any(file.is_symlink() for file in (here / DIRECTORY).rglob("*"))
    vector, commit = await embed(here / DIRECTORY)
    np.testing.assert_array_equal(vector, (await embed(checkpoint))[0])
    assert commit is None
    server = start(SERVE_DIRECTORY, here)
    try:
        server.wait_until_ready()
    finally:
        server.kill()


def test_half_of_a_cache_is_refused(cache: Path) -> None:
    (cache / CACHED / "1_Pooling" / "config.json").unlink()
    server = start(SERVE_CACHE, cache)
    assert server.wait() == 1
    assert server.lines[-1].startswith(f"tei-grpc: `{REPO}` is not in the cache, or not all of it")
    assert not any("Traceback" in line for line in server.lines)
