"""Reading weights: prefixes, shards, pickles, and what is wrong with a checkpoint."""

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tei_grpc.config import EngineConfig
from tei_grpc.engine.batch import pack
from tei_grpc.engine.runner import Runner
from tei_grpc.errors import StartupError
from tei_grpc.loading.model_config import read_model_config
from tei_grpc.loading.weights import Checkpoint, Names, load_weights
from tei_grpc.types import Entry, Kind
from tests.checkpoints import bert_t, clf_t, make_checkpoint

Tensors = dict[str, Tensor]


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return bert_t(tmp_path_factory.mktemp("bert"))


@pytest.fixture
def own_bert(bert: Path, tmp_path: Path) -> Path:
    """A copy that the test may change."""
    return Path(shutil.copytree(bert, tmp_path / "bert"))


def rewrite(folder: Path, change: Callable[[Tensors], Tensors]) -> None:
    file = folder / "model.safetensors"
    save_file(change(load_file(file)), file, {"format": "pt"})


def load(folder: Path, **options: object) -> Runner:
    config = EngineConfig(model_id=str(folder), **options)
    return Runner(read_model_config(folder, config), config)


def embed(folder: Path, kind: Kind = Kind.EMBED) -> np.ndarray:
    ((array,),) = load(folder).run(pack([Entry(0, kind, np.array([2, 82, 83, 3], np.int32))]))
    return np.asarray(array)


@pytest.mark.parametrize("prefix", ["bert.", "model.", "0.auto_model.", "0.auto_model.bert."])
def test_prefixes_of_tensor_names_do_not_matter(own_bert: Path, bert: Path, prefix: str) -> None:
    rewrite(own_bert, lambda tensors: {prefix + name: tensor for name, tensor in tensors.items()})
    assert np.array_equal(embed(own_bert), embed(bert))


@pytest.mark.parametrize("prefix", ["roberta.", "xlm-roberta.", "model.", "0.auto_model."])
def test_prefixes_of_roberta_do_not_matter(tmp_path: Path, prefix: str) -> None:
    folder = make_checkpoint("rob-t", tmp_path)
    expected = embed(folder)
    rewrite(folder, lambda tensors: {prefix + name: tensor for name, tensor in tensors.items()})
    assert np.array_equal(embed(folder), expected)


def test_gamma_and_beta_are_the_weight_and_bias_of_a_norm(own_bert: Path, bert: Path) -> None:
    def rename(name: str) -> str:
        return name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")

    rewrite(own_bert, lambda tensors: {rename(name): tensor for name, tensor in tensors.items()})
    assert np.array_equal(embed(own_bert), embed(bert))


def test_integer_buffers_are_skipped(own_bert: Path) -> None:
    rewrite(own_bert, lambda tensors: tensors | {"embeddings.position_ids": torch.arange(40)})
    assert embed(own_bert).shape == (32,)


def test_classifier_without_pooler_reads_the_first_token(tmp_path: Path) -> None:
    folder = clf_t(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    for part in ("weight", "bias"):  # a classifier that hands on the first token's own values
        tensors[f"classifier.{part}"] = torch.eye(3, 32) if part == "weight" else torch.zeros(3)
    rewrite(folder, lambda _: {name: tensor for name, tensor in tensors.items() if "pooler" not in name})
    logits = embed(folder, Kind.PREDICT)
    edit_architecture(folder, "BertModel")
    ((rows,),) = load(folder, pooling="cls").run(pack([Entry(0, Kind.EMBED, np.array([2, 82, 83, 3], np.int32))]))
    np.testing.assert_allclose(logits, rows[:3], atol=1e-6)


def edit_architecture(folder: Path, name: str) -> None:
    config = json.loads((folder / "config.json").read_text()) | {"architectures": [name]}
    (folder / "config.json").write_text(json.dumps(config))


def test_missing_tensor_is_named(own_bert: Path) -> None:
    name = "encoder.layer.1.attention.self.key.bias"
    rewrite(own_bert, lambda tensors: {key: tensor for key, tensor in tensors.items() if key != name})
    with pytest.raises(StartupError, match=f"lacks tensors: `{name}`$"):
        load(own_bert)


def test_unexpected_tensor_is_named(own_bert: Path) -> None:
    rewrite(own_bert, lambda tensors: tensors | {"encoder.layer.2.output.dense.bias": torch.zeros(32)})
    with pytest.raises(StartupError, match=r"unexpected tensors: `encoder\.layer\.2\.output\.dense\.bias`$"):
        load(own_bert)


def test_misshaped_tensor_is_named_with_both_shapes(own_bert: Path) -> None:
    rewrite(own_bert, lambda tensors: tensors | {"embeddings.word_embeddings.weight": torch.zeros(92, 32)})
    with pytest.raises(StartupError, match=r"`embeddings\.word_embeddings\.weight` has shape \[92, 32\].*\[93, 32\]"):
        load(own_bert)


def test_only_the_first_missing_tensors_are_listed(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(1)}, tmp_path / "model.safetensors")
    module = nn.Module()
    for name in "abcdefgh":
        setattr(module, name, nn.Parameter(torch.zeros(1, device="meta")))
    with pytest.raises(StartupError, match=r"`b`, `c`, `d`, `e`, `f` and 2 more$"):
        load_weights(module, Checkpoint(tmp_path), Names(), dtype=torch.float32)


def shard(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    parts = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, part in parts.items():
        save_file({name: tensors[name] for name in part}, folder / file)
    weight_map = {name: file for file, part in parts.items() for name in part}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def test_shards_are_read_through_their_index(own_bert: Path, bert: Path) -> None:
    shard(own_bert)
    save_file({"stray": torch.zeros(1)}, own_bert / "stray.safetensors")
    assert np.array_equal(embed(own_bert), embed(bert))


def test_missing_shard_is_named(own_bert: Path) -> None:
    shard(own_bert)
    (own_bert / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(StartupError, match=r"model-00002-of-00002\.safetensors is missing"):
        load(own_bert)


@pytest.mark.parametrize("zipped", [True, False])
def test_pytorch_model_bin_is_read(own_bert: Path, bert: Path, zipped: bool) -> None:
    tensors = load_file(own_bert / "model.safetensors")
    (own_bert / "model.safetensors").unlink()
    torch.save(tensors, own_bert / "pytorch_model.bin", _use_new_zipfile_serialization=zipped)
    assert np.array_equal(embed(own_bert), embed(bert))


class Code:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[object, tuple[Path]]:
        return Path.touch, (self.marker,)


@pytest.mark.parametrize("save", [torch.save, lambda code, file: file.write_bytes(pickle.dumps(code, protocol=2))])
def test_pickle_with_code_is_refused_and_not_run(own_bert: Path, tmp_path: Path, save: Callable[..., None]) -> None:
    (own_bert / "model.safetensors").unlink()
    save({"weight": Code(tmp_path / "marker")}, own_bert / "pytorch_model.bin")
    with pytest.raises(StartupError, match=r"pytorch_model\.bin .*could run code"):
        load(own_bert)
    assert not (tmp_path / "marker").exists()


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
@pytest.mark.parametrize("size", [0, 4, 1000])
def test_truncated_file_is_named(own_bert: Path, name: str, size: int) -> None:
    tensors = load_file(own_bert / "model.safetensors")
    if name == "pytorch_model.bin":
        (own_bert / "model.safetensors").unlink()
        torch.save(tensors, own_bert / name)
    (own_bert / name).write_bytes((own_bert / name).read_bytes()[:size])
    with pytest.raises(StartupError, match=f"{name}"):
        load(own_bert)


def test_lfs_pointer_is_named(own_bert: Path) -> None:
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 134\n"
    (own_bert / "model.safetensors").write_text(pointer)
    with pytest.raises(StartupError, match=r"model\.safetensors is a Git LFS pointer"):
        load(own_bert)


def test_folder_without_weights_is_refused(own_bert: Path) -> None:
    (own_bert / "model.safetensors").unlink()
    with pytest.raises(StartupError, match="no weights"):
        load(own_bert)


@pytest.mark.parametrize(
    ("other", "kind"), [("model.onnx", "ONNX"), ("onnx/model.onnx", "ONNX"), ("tf_model.h5", "TensorFlow")]
)
def test_folder_with_weights_of_another_kind_is_refused_for_that(own_bert: Path, other: str, kind: str) -> None:
    (own_bert / other).parent.mkdir(exist_ok=True)
    (own_bert / "model.safetensors").rename(own_bert / other)
    with pytest.raises(StartupError, match=f"no weights in .*; it has them for {kind} only, which is not supported"):
        load(own_bert)


def test_lfs_pointer_in_place_of_the_index_is_named(own_bert: Path) -> None:
    shard(own_bert)
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 134\n"
    (own_bert / "model.safetensors.index.json").write_text(pointer)
    with pytest.raises(StartupError, match=r"index\.json is a Git LFS pointer"):
        load(own_bert)


@pytest.mark.parametrize(("stored", "dtype"), [("bfloat16", "float32"), ("float32", "bfloat16")])
def test_weights_of_another_dtype_are_converted_with_a_warning(own_bert: Path, caplog, stored: str, dtype: str) -> None:
    rewrite(own_bert, lambda tensors: {name: tensor.to(getattr(torch, stored)) for name, tensor in tensors.items()})
    load(own_bert, dtype=dtype)
    assert caplog.messages.count(f"weights are stored as {stored} and run as {dtype}") == 1


def test_weights_of_the_dtype_of_the_run_need_no_warning(bert: Path, caplog) -> None:
    load(bert)
    assert "stored as" not in caplog.text


def test_floats_are_cast_to_the_dtype_of_the_run(own_bert: Path, bert: Path) -> None:
    rewrite(own_bert, lambda tensors: {name: tensor.bfloat16() for name, tensor in tensors.items()})
    cosine = np.dot(embed(own_bert), embed(bert)) / np.linalg.norm(embed(own_bert)) / np.linalg.norm(embed(bert))
    assert cosine > 0.999
