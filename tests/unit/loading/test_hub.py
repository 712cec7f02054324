"""From a hub id or a directory to a folder: the real client library against a stand-in for the hub."""

import logging
import os
import resource
import socket
import traceback
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import constants

from tei_grpc.config import EngineConfig
from tei_grpc.errors import StartupError
from tei_grpc.loading import hub
from tests.hub import COMMIT
from tests.unit.loading.conftest import FILES, REPO

OUT_OF_REACH = f"`{REPO}` is not in the cache, or not all of it, and the hub cannot be reached"
TOKEN = "hf_SESAME"
PICKLES_ONLY = {name: content for name, content in FILES.items() if not name.endswith(".safetensors")}


def config(cache: Path, model_id: str = REPO, **options: object) -> EngineConfig:
    return EngineConfig(model_id=model_id, huggingface_hub_cache=cache, **options)


def refusal(cache: Path, model_id: str = REPO, **options: object) -> str:
    with pytest.raises(StartupError) as error:
        hub.fetch(config(cache, model_id, **options))
    return error.value.message


def found(folder: Path) -> set[str]:
    return {str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()}


def test_model_is_downloaded_with_its_commit(serve_hub, tmp_path):
    serve_hub()
    folder, sha = hub.fetch(config(tmp_path))
    assert sha == COMMIT
    assert (folder / "model.safetensors").read_bytes() == b"model.safetensors"


def test_neither_pickles_nor_other_runtimes_are_downloaded_beside_safetensors(serve_hub, tmp_path):
    served = serve_hub()
    folder, _ = hub.fetch(config(tmp_path))
    expected = {
        "config.json",
        "tokenizer.json",
        "1_Pooling/config.json",
        "model.safetensors",
        "2_Dense/config.json",
        "2_Dense/model.safetensors",
    }
    assert found(folder) == expected
    assert served.fetched() == expected


def test_shards_and_their_index_are_downloaded(serve_hub, tmp_path):
    shards = {"model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "model.safetensors.index.json"}
    serve_hub(files={"config.json": b"{}", **dict.fromkeys(shards, b"{}"), "pytorch_model.bin": b"pickle"})
    assert found(hub.fetch(config(tmp_path)).folder) == {"config.json", *shards}


def test_pickles_are_downloaded_where_there_is_nothing_else(serve_hub, tmp_path):
    serve_hub(files=PICKLES_ONLY)
    folder, _ = hub.fetch(config(tmp_path))
    assert {"pytorch_model.bin", "2_Dense/pytorch_model.bin", "config.json"} <= found(folder)


def test_pickle_of_a_module_is_downloaded_where_only_the_model_has_safetensors(serve_hub, tmp_path):
    served = serve_hub(files={name: content for name, content in FILES.items() if name != "2_Dense/model.safetensors"})
    folder, _ = hub.fetch(config(tmp_path))
    assert (folder / "2_Dense" / "pytorch_model.bin").exists()
    assert "pytorch_model.bin" not in served.fetched()


def test_pickle_of_the_chosen_dense_module_is_downloaded(serve_hub, tmp_path):
    chosen = {"2_Dense_256/config.json": b"{}", "2_Dense_256/pytorch_model.bin": b"pickle"}
    serve_hub(files={**FILES, **chosen})
    folder, _ = hub.fetch(config(tmp_path, dense_path="2_Dense_256"))
    assert chosen.keys() <= found(folder)


def test_heads_of_bge_m3_are_downloaded_as_the_pickles_that_they_are(serve_hub, tmp_path):
    heads = dict.fromkeys(("sparse_linear.pt", "colbert_linear.pt"), b"pickle")
    serve_hub(files={**FILES, **heads, "optimizer.pt": b"pickle"})
    folder, _ = hub.fetch(config(tmp_path))
    assert heads.keys() <= found(folder)
    assert "optimizer.pt" not in found(folder)


def test_vocabularies_are_downloaded(serve_hub, tmp_path):
    names = {"vocab.txt", "vocab.json", "merges.txt", "sentencepiece.bpe.model", "special_tokens_map.json"}
    serve_hub(files={**FILES, **dict.fromkeys(names, b"{}")})
    assert names <= found(hub.fetch(config(tmp_path)).folder)


def test_revision_is_asked_for(serve_hub, tmp_path):
    served = serve_hub(revisions=("main", "v2"))
    assert hub.fetch(config(tmp_path, revision="v2")).sha == COMMIT
    assert f"/api/models/{REPO}/revision/v2" in served.requests


@pytest.mark.parametrize("files", [FILES, PICKLES_ONLY], ids=["safetensors", "pickles"])
def test_cache_serves_without_the_hub(serve_hub, tmp_path, monkeypatch, no_network_later, files):
    serve_hub(files=files)
    online = hub.fetch(config(tmp_path))
    no_network_later()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert hub.fetch(config(tmp_path)) == online


def test_second_start_downloads_nothing(serve_hub, tmp_path):
    served = serve_hub()
    hub.fetch(config(tmp_path))
    served.requests.clear()
    hub.fetch(config(tmp_path))
    assert served.fetched() == set()


def test_private_model_needs_its_token(serve_hub, tmp_path):
    serve_hub(token="hf_secret")
    text = f"`{REPO}` is neither a directory nor a model on the hub that `--hf-token` may read"
    assert refusal(tmp_path) == text
    assert refusal(tmp_path, hf_token="hf_wrong") == text
    assert hub.fetch(config(tmp_path, hf_token="hf_secret")).sha == COMMIT


def test_gated_model_says_so(serve_hub, tmp_path):
    serve_hub(gated=True)
    assert refusal(tmp_path) == f"`{REPO}` is gated: `--hf-token` must belong to an account with access"


def test_unknown_model_is_named(serve_hub, tmp_path):
    serve_hub()
    text = refusal(tmp_path, "acme/other")
    assert text == "`acme/other` is neither a directory nor a model on the hub that `--hf-token` may read"


def test_unknown_revision_is_named(serve_hub, tmp_path):
    serve_hub()
    assert refusal(tmp_path, revision="v9") == f"`{REPO}` has no `--revision` `v9`"


def test_hub_out_of_reach_is_said(serve_hub, tmp_path, monkeypatch):
    served = serve_hub()
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{unused.getsockname()[1]}")
        text = refusal(tmp_path)
    assert text.startswith(OUT_OF_REACH)
    assert served.requests == []


def test_offline_without_a_cache_is_said(tmp_path, monkeypatch, no_network):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert refusal(tmp_path).startswith(OUT_OF_REACH)


def test_hub_in_trouble_is_a_startup_error(serve_hub, tmp_path):
    serve_hub(broken=True)
    assert refusal(tmp_path).startswith(OUT_OF_REACH)


def test_download_that_breaks_off_is_a_startup_error(serve_hub, tmp_path, monkeypatch):
    def break_off(*_: object, **__: object) -> None:
        raise EOFError("connection cut")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", break_off)
    assert refusal(tmp_path) == f"`{REPO}` could not be downloaded: connection cut"


@pytest.mark.parametrize("model_id", ["a/b/c", "-x", "a" * 300, "x\x00y"])
def test_what_is_neither_directory_nor_id_is_refused(tmp_path, model_id):
    assert refusal(tmp_path, model_id) == f"`--model-id`: `{model_id}` is neither a directory nor a hub id"


@pytest.mark.parametrize("model_id", ["/nowhere", "./nowhere", "../nowhere", "~/nowhere", "~nobody-by-this-name/x"])
def test_missing_directory_is_not_looked_for_on_the_hub(tmp_path, no_network, model_id):
    assert refusal(tmp_path, model_id) == f"`--model-id`: there is no directory `{model_id}`"


def test_directory_opens_no_connection(tmp_path, no_network):
    assert hub.fetch(EngineConfig(model_id=str(tmp_path))) == (tmp_path, None)


def test_directory_that_is_named_like_an_id_wins(tmp_path, no_network, monkeypatch):
    (tmp_path / "acme" / "tiny").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert hub.fetch(EngineConfig(model_id=REPO)).folder == Path(REPO)


def test_directory_in_the_home_is_found(tmp_path, no_network, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "tiny").mkdir()
    assert hub.fetch(EngineConfig(model_id="~/tiny")).folder == tmp_path / "tiny"


def test_commit_of_a_linked_snapshot_is_reported(tmp_path, no_network):
    snapshot = tmp_path / "models--acme--tiny" / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    os.symlink(snapshot, tmp_path / "link")
    assert hub.fetch(EngineConfig(model_id=str(tmp_path / "link"))) == (tmp_path / "link", COMMIT)


def test_other_directory_has_no_commit(tmp_path, no_network):
    (tmp_path / "snapshots" / "v1").mkdir(parents=True)
    assert hub.fetch(EngineConfig(model_id=str(tmp_path / "snapshots" / "v1"))).sha is None


@pytest.mark.parametrize(
    "hub_options", [{"token": TOKEN}, {"token": "another"}, {"gated": True}, {"broken": True}, {"revisions": ()}]
)
def test_token_is_in_no_log_and_no_error(serve_hub, tmp_path, caplog, hub_options):
    caplog.set_level("DEBUG")
    logging.getLogger("huggingface_hub").setLevel("DEBUG")
    serve_hub(**hub_options)
    try:
        hub.fetch(config(tmp_path, hf_token=TOKEN))
    except StartupError as error:
        assert TOKEN not in "".join(traceback.format_exception(error))
    assert TOKEN not in caplog.text


def test_full_disk_is_named_and_nothing_half_written_is_taken_for_the_model(serve_hub, tmp_path):
    """A limit to the size of files stands in for the disk."""
    serve_hub()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4, limits[1]))
    try:
        text = refusal(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert text.startswith(f"`{REPO}` could not be downloaded: ")
    folder, _ = hub.fetch(config(tmp_path))
    assert (folder / "model.safetensors").read_bytes() == b"model.safetensors"
