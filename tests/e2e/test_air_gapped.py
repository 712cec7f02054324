"""From a machine with a hub to one without, by the commands of docs/operations.md; the hub is a stand-in."""

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
from tests.e2e.servers import Server, clean_environment
from tests.hub import COMMIT, Hub, serve

HF = Path(sys.executable).with_name("hf")
REPO = "acme/tiny"
TEXT = "hello world"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return bert_t(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="module")
def hub(checkpoint: Path) -> Iterator[Hub]:
    files = {str(file.relative_to(checkpoint)): file.read_bytes() for file in checkpoint.rglob("*") if file.is_file()}
    with serve(Hub(REPO, files)) as hub:
        yield hub


def download(hub: Hub, *options: str | Path) -> None:
    """What one does where there is a hub."""
    switches = {"HF_ENDPOINT": hub.endpoint, "HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_DISABLE_UPDATE_CHECK": "1"}
    command = [str(option) for option in (HF, "download", REPO, *options)]
    run = subprocess.run(command, env=clean_environment() | switches, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr


async def embed(folder: Path) -> tuple[np.ndarray, str | None]:
    """A vector, and the commit that Info names."""
    async with Engine(EngineConfig(model_id=str(folder))) as engine:
        return (await engine.embed(TEXT)).embeddings, engine.info.model_sha


@pytest.fixture
def cache(hub: Hub, tmp_path: Path) -> Path:
    """A cache that was carried to where there is no hub, by a way that keeps its links."""
    download(hub, "--cache-dir", tmp_path / "there")
    with subprocess.Popen(["tar", "-C", tmp_path / "there", "-c", "."], stdout=subprocess.PIPE) as packing:
        (tmp_path / "here").mkdir()
        subprocess.run(["tar", "-C", tmp_path / "here", "-x"], stdin=packing.stdout, check=True)
    shutil.rmtree(tmp_path / "there")
    return tmp_path / "here"


async def test_carried_cache_is_served_by_the_models_name(cache: Path, checkpoint: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as nobody:  # whoever connects is seen, and never answered
        endpoint = f"http://127.0.0.1:{nobody.getsockname()[1]}"
        options = ("--model-id", REPO, "--huggingface-hub-cache", str(cache))
        server = Server(*options, HF_HUB_OFFLINE="1", HF_ENDPOINT=endpoint, OMP_NUM_THREADS="1")
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
    snapshot = cache / "models--acme--tiny" / "snapshots" / COMMIT
    assert (snapshot / "model.safetensors").is_symlink()
    vector, commit = await embed(snapshot)
    np.testing.assert_array_equal(vector, (await embed(checkpoint))[0])
    assert commit == COMMIT


async def test_plain_directory_is_served(hub: Hub, checkpoint: Path, tmp_path: Path) -> None:
    download(hub, "--local-dir", tmp_path / "model")
    assert not any(file.is_symlink() for file in (tmp_path / "model").rglob("*"))
    vector, commit = await embed(tmp_path / "model")
    np.testing.assert_array_equal(vector, (await embed(checkpoint))[0])
    assert commit is None


def test_half_of_a_cache_is_refused(cache: Path) -> None:
    (cache / "models--acme--tiny" / "snapshots" / COMMIT / "1_Pooling" / "config.json").unlink()
    server = Server("--model-id", REPO, "--huggingface-hub-cache", str(cache), HF_HUB_OFFLINE="1")
    assert server.wait() == 1
    assert server.lines[-1].startswith(f"tei-grpc: `{REPO}` is not in the cache, or not all of it")
    assert not any("Traceback" in line for line in server.lines)
