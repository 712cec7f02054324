"""Downloads that meet trouble, and caches that moved: the real client library against a stand-in for the hub."""

import errno
import logging
import os
import shutil
import tempfile
from pathlib import Path

import pytest
from huggingface_hub import constants, file_download

from tei_grpc.config import EngineConfig
from tei_grpc.errors import StartupError
from tei_grpc.loading import hub
from tests.hub import COMMIT
from tests.unit.loading.conftest import FILES, REPO

LATER = "f" * 40
WEIGHTS = bytes(range(256)) * 20
NOBODY = 65534


def config(cache: Path, **options: object) -> EngineConfig:
    return EngineConfig(model_id=REPO, huggingface_hub_cache=cache, **options)


def refusal(cache: Path, **options: object) -> str:
    with pytest.raises(StartupError) as error:
        hub.fetch(config(cache, **options))
    return error.value.message


@pytest.fixture
def small_chunks(monkeypatch):
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 100)


def test_download_goes_on_where_the_connection_broke_off(serve_hub, small_chunks, tmp_path):
    served = serve_hub(files={**FILES, "model.safetensors": WEIGHTS}, cuts={"model.safetensors": 2000})
    folder, _ = hub.fetch(config(tmp_path))
    assert served.ranges == {"model.safetensors": "bytes=2000-"}
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS


def test_later_commit_downloads_only_what_has_changed(serve_hub, tmp_path):
    serve_hub()
    hub.fetch(config(tmp_path))
    later = serve_hub(commit=LATER, files={**FILES, "config.json": b"changed"})
    folder, sha = hub.fetch(config(tmp_path))
    assert sha == LATER
    assert later.fetched() == {"config.json"}
    assert (folder / "model.safetensors").read_bytes() == FILES["model.safetensors"]


def test_pinned_commit_in_the_cache_asks_nobody(serve_hub, tmp_path, no_network_later):
    serve_hub()
    online = hub.fetch(config(tmp_path, revision=COMMIT))
    no_network_later()
    assert hub.fetch(config(tmp_path, revision=COMMIT)) == online


class FullDisk:
    """A file on a disk that has room for so many bytes."""

    def __init__(self, file, room):
        self._file, self._room = file, room

    def write(self, data):
        self._file.write(data[: self._room])
        if len(data) > self._room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._room -= len(data)

    def __getattr__(self, name):
        return getattr(self._file, name)


@pytest.fixture
def full_disk(monkeypatch, small_chunks):
    """Files of more than 1000 bytes have no room."""
    write = file_download.http_get

    def write_to_full_disk(url, temp_file, **options):
        write(url, FullDisk(temp_file, 1000), **options)

    monkeypatch.setattr(file_download, "http_get", write_to_full_disk)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(9_000_000, 8_999_000, 1_000))


@pytest.mark.filterwarnings("ignore:Not enough free disk space:UserWarning")
def test_full_disk_is_named_with_what_it_would_need(serve_hub, full_disk, tmp_path):
    serve_hub(files={**FILES, "model.safetensors": bytes(2_500_000)})
    assert refusal(tmp_path) == (
        f"`--huggingface-hub-cache` `{tmp_path}` is full: there is no room for `{REPO}`, of which 2.5 MB are missing, "
        "while 0.0 MB are free"
    )


@pytest.mark.filterwarnings("ignore:Not enough free disk space:UserWarning")
def test_nothing_half_written_is_left_on_a_full_disk(serve_hub, full_disk, tmp_path, monkeypatch):
    serve_hub(files={**FILES, "model.safetensors": WEIGHTS})
    refusal(tmp_path)
    assert not [file for file in tmp_path.rglob("*") if file.is_file() and file.read_bytes() == WEIGHTS[:1000]]
    assert not list(tmp_path.rglob("*.incomplete"))
    assert not [file for file in tmp_path.rglob("model.safetensors") if file.parent.parent.name == "snapshots"]
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "not all of it" in refusal(tmp_path)


@pytest.fixture
def shared_folder():
    """A folder that other users can reach, as tmp_path is not."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        yield folder


@pytest.fixture
def read_only(monkeypatch, shared_folder):
    """Make a folder read-only, also for root, who becomes somebody else until the test is over."""

    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(shared_folder / "token"))

    def protect(folder: Path) -> None:
        for place in (folder, *folder.rglob("*")):
            if not place.is_symlink():
                place.chmod(0o555 if place.is_dir() else 0o444)
        if os.geteuid() == 0:
            os.seteuid(NOBODY)

    yield protect
    if os.getuid() == 0:
        os.seteuid(0)


def test_read_only_cache_serves_without_the_hub(serve_hub, shared_folder, read_only, monkeypatch):
    serve_hub()
    online = hub.fetch(config(shared_folder))
    read_only(shared_folder)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert hub.fetch(config(shared_folder)) == online


def test_read_only_cache_serves_with_the_hub_at_hand(serve_hub, shared_folder, read_only):
    served = serve_hub()
    online = hub.fetch(config(shared_folder))
    served.requests.clear()
    read_only(shared_folder)
    assert hub.fetch(config(shared_folder)) == online
    assert served.fetched() == set()


def test_read_only_cache_that_lacks_files_is_named(serve_hub, shared_folder, read_only):
    serve_hub()
    read_only(shared_folder)
    user = NOBODY if os.getuid() == 0 else os.getuid()
    expected = f"`{shared_folder}` cannot be written by user {user}, and lacks files of `{REPO}`; make it this user's"
    assert expected in refusal(shared_folder)


def test_cache_that_was_copied_serves_without_the_hub(serve_hub, tmp_path, monkeypatch):
    serve_hub()
    hub.fetch(config(tmp_path / "here"))
    shutil.copytree(tmp_path / "here", tmp_path / "there", symlinks=True)
    shutil.rmtree(tmp_path / "here")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    folder, sha = hub.fetch(config(tmp_path / "there"))
    assert sha == COMMIT
    assert (folder / "model.safetensors").is_symlink()
    assert (folder / "model.safetensors").read_bytes() == FILES["model.safetensors"]


def test_token_is_never_told(serve_hub, full_disk, tmp_path, caplog, capfd):
    token = "hf_very_secret"
    with caplog.at_level(logging.DEBUG):
        serve_hub(token=token)
        hub.fetch(config(tmp_path, hf_token=token))
        serve_hub(token=token, commit=LATER, files={**FILES, "model.safetensors": WEIGHTS})
        told = refusal(tmp_path, hf_token=token)
        serve_hub(token="another")
        told += refusal(tmp_path / "empty", hf_token=token)
    told += caplog.text + "".join(capfd.readouterr())
    assert "config.json" in told
    assert token not in told
