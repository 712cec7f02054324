"""`docker run` lines as people have them for text-embeddings-inference, with our image in place of its."""

import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import grpc
import huggingface_hub
import pytest
import yaml
from pydantic import SecretStr

from tei_grpc import cli
from tei_grpc.config import Settings
from tei_grpc.pb import tei_pb2, tei_pb2_grpc
from tests.checkpoints import bert_t
from tests.deploy.image import Process, docker_run, read_image
from tests.deploy.manifests import ROOT
from tests.e2e.servers import clean_environment, free_port

TEI = "ghcr.io/huggingface/text-embeddings-inference"
DATA = {"port": 80, "huggingface_hub_cache": Path("/data")}
PYPROJECT = (ROOT / "pyproject.toml").read_text()
TABLE = yaml.safe_load((Path(__file__).parent / "docker_run.yaml").read_text())


def start(process: Process, monkeypatch: pytest.MonkeyPatch) -> int:
    for name, value in process.environment.items():
        monkeypatch.setenv(name, value)
    return cli.main(process.argv[1:])


def plain(value: object) -> object:
    """As the table has it."""
    if isinstance(value, tuple):
        return list(value)
    return value.get_secret_value() if isinstance(value, SecretStr) else value


@pytest.mark.parametrize("row", TABLE, ids=[row["run"].partition(TEI)[2] for row in TABLE])
def test_line_means_what_it_says(
    served: list[Settings], monkeypatch: pytest.MonkeyPatch, row: dict[str, object]
) -> None:
    process = docker_run(row["run"])
    assert start(process, monkeypatch) == 0
    [settings] = served
    expected = {**row["means"], **(DATA if row["means"].get("data") else {})}
    expected.pop("data", None)
    assert {name: plain(getattr(settings, name)) for name in expected} == expected
    assert list(process.ports) == [settings.port], "the port that is published is the one that the server opens"
    if "/data" in process.volumes:
        assert settings.huggingface_hub_cache == Path("/data"), "models are kept on the volume"


@pytest.mark.parametrize("name", ["HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"])
def test_token_of_the_hub_has_two_names(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    for other in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(other, raising=False)
    monkeypatch.setenv(name, "hf_secret")
    assert huggingface_hub.get_token() == "hf_secret"


def test_torch_of_the_image_is_the_one_of_the_tests() -> None:
    [tested] = [
        line for line in tomllib.loads(PYPROJECT)["project"]["optional-dependencies"]["dev"] if "torch==" in line
    ]
    assert f"ARG TORCH_VERSION={tested.removeprefix('torch==')}" in (ROOT / "Dockerfile-grpc").read_text().splitlines()


def test_model_has_to_be_named(served: list[Settings], monkeypatch: pytest.MonkeyPatch) -> None:
    assert start(docker_run(f"docker run -p 8080:80 {TEI}:1.9"), monkeypatch) == cli.USAGE_ERROR


READ_ONLY = ["unshare", "--mount", "sh", "-c", 'mount -o remount,bind,ro / && exec "$@"', "sh"]


class Container:
    """A process of the image on this machine: volumes are replaced by their directories of the host."""

    def __init__(self, process: Process, *, read_only: bool) -> None:
        def here(text: str) -> str:
            for inside, outside in process.volumes.items():
                if text == inside or text.startswith(f"{inside}/"):
                    return outside + text.removeprefix(inside)
            return text

        self.environment = clean_environment() | {name: here(value) for name, value in process.environment.items()}
        argv = [sys.executable, "-m", "tei_grpc", *map(here, process.argv[1:])]
        prefix = READ_ONLY if read_only else []
        self._process = subprocess.Popen([*prefix, *argv], env=self.environment, stdout=subprocess.PIPE, text=True)

    def is_healthy(self) -> bool:
        """Ask as the image's HEALTHCHECK does, for whose first process this one stands."""
        health = read_image().health
        assert (health[0], health[-1]) == ("tei-grpc", "1")
        argv = [sys.executable, "-m", "tei_grpc", *health[1:-1], str(self._process.pid)]
        return subprocess.run(argv, env=self.environment, stdout=subprocess.DEVNULL, timeout=60).returncode == 0

    def wait_until_serving(self) -> None:
        assert self._process.stdout is not None
        assert any("Serving on" in line for line in self._process.stdout), "the server has ended"

    def stop(self) -> int:
        self._process.terminate()
        self._process.communicate(timeout=60)
        return self._process.returncode


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    bert_t(tmp_path / "model")
    return tmp_path


def run_line(folder: Path, *, by_flags: bool) -> str:
    port = free_port()
    run = f"docker run -p {port}:{port} -v {shlex.quote(f'{folder}:/data')} -e PROMETHEUS_PORT=0 -e HF_HUB_OFFLINE=1"
    if by_flags:
        return f"{run} --rm {TEI}:cpu-1.9 --model-id /data/model --port {port} --pooling mean"
    return f"{run} -d -e MODEL_ID=/data/model -e PORT={port} -e POOLING=mean {TEI}:cpu-1.9"


def check_that_it_serves(process: Process, *, read_only: bool = False) -> None:
    container = Container(process, read_only=read_only)
    try:
        container.wait_until_serving()
        assert container.is_healthy()
        [port] = process.ports.values()
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            reply = tei_pb2_grpc.EmbedStub(channel).Embed(tei_pb2.EmbedRequest(inputs="w1"), timeout=30)
        assert len(reply.embeddings) > 0
    finally:
        assert container.stop() == 0


def test_container_that_is_told_its_port_by_a_flag_is_healthy_and_answers(folder: Path) -> None:
    check_that_it_serves(docker_run(run_line(folder, by_flags=True)))


def test_container_whose_file_system_is_read_only_is_healthy_and_answers(folder: Path) -> None:
    if subprocess.run([*READ_ONLY, "true"], capture_output=True).returncode:
        pytest.skip("only root may make a file system read-only")
    check_that_it_serves(docker_run(run_line(folder, by_flags=False)), read_only=True)
