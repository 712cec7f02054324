"""The runner on tiny checkpoints: answers by kind, each entry's own errors, modules after pooling."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tei_grpc import cpus
from tei_grpc.config import EngineConfig
from tei_grpc.engine.batch import pack
from tei_grpc.engine.runner import Runner
from tei_grpc.errors import InferenceError, ModelTypeError, StartupError
from tei_grpc.loading.model_config import read_model_config
from tei_grpc.types import Entry, Kind
from tests.checkpoints import bert_t, clf_t, mlm_t

POISONED = 80
TEXTS = [np.array(ids, np.int32) for ids in ([2, 82, 3], [2, 30, 83, 3], [2, 5, 6, 7, 8, 3])]


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return bert_t(tmp_path_factory.mktemp("bert"))


@pytest.fixture
def own_bert(bert: Path, tmp_path: Path) -> Path:
    """A copy that the test may change."""
    return Path(shutil.copytree(bert, tmp_path / "bert"))


def load(folder: Path, **options: object) -> Runner:
    config = EngineConfig(model_id=str(folder), **options)
    return Runner(read_model_config(folder, config), config)


def entries(kind: Kind, prompt_tokens: int = 0) -> list[Entry]:
    return [Entry(i, kind, text, prompt_tokens=prompt_tokens) for i, text in enumerate(TEXTS)]


def test_arrays_are_float32_and_own_their_memory(bert: Path) -> None:
    runner = load(bert, dtype="bfloat16")
    for answer in runner.run(pack(entries(Kind.EMBED) + entries(Kind.EMBED_ALL))):
        (array,) = answer
        assert array.dtype == np.float32
        assert array.base is None
        assert array.flags.c_contiguous


def test_answers_come_in_the_order_of_the_entries(bert: Path) -> None:
    kinds = [Kind.EMBED_ALL, Kind.EMBED, Kind.EMBED_ALL]
    batch = pack([Entry(i, kind, text) for i, (kind, text) in enumerate(zip(kinds, TEXTS, strict=True))])
    assert [array.shape for (array,) in load(bert).run(batch)] == [(3, 32), (32,), (6, 32)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_batch_that_two_threads_share_gets_what_each_text_gets_alone(
    own_bert: Path, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    """Also where the answers of one text are not finite."""
    poison(own_bert, token=POISONED)
    monkeypatch.setattr(cpus, "available", lambda: 2)
    runner, alone = load(own_bert, dtype=dtype), load(own_bert, dtype=dtype)
    kinds = [Kind.EMBED, Kind.EMBED_ALL]
    lengths = [2, 3, 3, 5, 8, 8, 13, 21, 30, 30, 31, 32]
    ids = [np.arange(row, row + length, dtype=np.int32) % 50 + 10 for row, length in enumerate(lengths)]
    ids[5][1] = POISONED
    mixed = [Entry(row, kinds[row % 2], text) for row, text in enumerate(ids)]
    assert len(runner._shards.cut(lengths)) == 2
    for entry, found in zip(mixed, runner.run(pack(mixed)), strict=True):
        (expected,) = alone.run(pack([entry]))
        if entry.id == 5:
            assert isinstance(found, InferenceError)
            assert isinstance(expected, InferenceError)
        else:
            np.testing.assert_allclose(found[0], expected[0], atol=1e-5 if dtype == "float32" else 0.1)


def test_facts_name_what_runs(bert: Path) -> None:
    facts = load(bert, dtype="bfloat16").facts
    assert (facts.dtype, facts.device, facts.embedding_size, facts.hidden_size) == ("bfloat16", "cpu", 32, 32)


def test_embedding_size_of_splade_is_the_vocabulary(tmp_path: Path) -> None:
    assert load(mlm_t(tmp_path), pooling="splade").facts.embedding_size == 93


def test_vectors_are_not_normalised(bert: Path) -> None:
    ((vector,), *_) = load(bert).run(pack(entries(Kind.EMBED)))
    ((rows,), *_) = load(bert).run(pack(entries(Kind.EMBED_ALL)))
    np.testing.assert_allclose(vector, rows.mean(axis=0), atol=1e-6)


def test_prompt_tokens_are_left_out_of_the_mean(bert: Path) -> None:
    ((vector,), *_) = load(bert).run(pack(entries(Kind.EMBED, prompt_tokens=2)))
    ((rows,), *_) = load(bert).run(pack(entries(Kind.EMBED_ALL)))
    np.testing.assert_allclose(vector, rows[2], atol=1e-6)


def test_kind_that_the_model_cannot_answer_fails_alone(tmp_path: Path) -> None:
    batch = pack([Entry(0, Kind.PREDICT, TEXTS[0]), Entry(1, Kind.EMBED, TEXTS[1])])
    (logits,), error = load(clf_t(tmp_path)).run(batch)
    assert logits.shape == (3,)
    assert isinstance(error, ModelTypeError)


@pytest.mark.parametrize("kind", [Kind.EMBED, Kind.EMBED_ALL])
def test_non_finite_output_fails_its_own_entry_only(own_bert: Path, kind: Kind) -> None:
    clean = load(own_bert).run(pack(entries(kind)))
    poison(own_bert, token=30)
    first, second, third = load(own_bert).run(pack(entries(kind)))
    assert isinstance(second, InferenceError)
    np.testing.assert_allclose(first[0], clean[0][0], atol=1e-6)
    np.testing.assert_allclose(third[0], clean[2][0], atol=1e-6)


def test_non_finite_weight_is_no_sparse_answer(tmp_path: Path) -> None:
    folder = mlm_t(tmp_path)
    poison(folder, token=30, name="bert.embeddings.word_embeddings.weight")
    answers = load(folder, pooling="splade").run(pack(entries(Kind.EMBED_SPARSE)))
    assert all(isinstance(answer, InferenceError) for answer in answers)  # the decoder is tied


def poison(folder: Path, *, token: int, name: str = "embeddings.word_embeddings.weight") -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors[name][token] = torch.inf
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def test_warm_up_and_check_run_for_every_kind_of_model(bert: Path, tmp_path: Path) -> None:
    for runner in (load(bert), load(clf_t(tmp_path))):
        runner.warm_up()
        runner.check()


def test_unsupported_model_type_is_named(own_bert: Path) -> None:
    edit_config(own_bert, model_type="nonesuch")
    with pytest.raises(StartupError, match=r"'nonesuch'.*bert.*roberta"):
        load(own_bert, pooling="mean")


def test_unsupported_activation_is_named(own_bert: Path) -> None:
    edit_config(own_bert, hidden_act="gelo")
    with pytest.raises(StartupError, match="`gelo`"):
        load(own_bert)


def test_config_that_lacks_a_size_is_refused(own_bert: Path) -> None:
    edit_config(own_bert, intermediate_size=None)
    with pytest.raises(StartupError, match="intermediate_size"):
        load(own_bert)


def edit_config(folder: Path, **changes: object) -> None:
    config = json.loads((folder / "config.json").read_text()) | changes
    kept = {key: value for key, value in config.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(kept))


@pytest.mark.parametrize("activation", ["Tanh", "Identity", None])
@pytest.mark.parametrize("residual", [False, True])
def test_dense_modules_equal_sentence_transformers(own_bert: Path, activation: str | None, residual: bool) -> None:
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Dense, Normalize

    model = SentenceTransformer(str(own_bert), device="cpu")
    function = {} if activation is None else {"activation_function": getattr(torch.nn, activation)()}
    dense = [Dense(32, 16, **function, use_residual=residual), Dense(16, 16, bias=False, use_residual=residual)]
    folder = own_bert.parent / "with dense"
    SentenceTransformer(modules=[model[0], model[1], *dense, Normalize()], device="cpu").save(str(folder))

    runner = load(folder)
    ((vector,),) = runner.run(pack([Entry(0, Kind.EMBED, np.array(model.tokenizer("hello")["input_ids"], np.int32))]))
    expected = SentenceTransformer(str(folder), device="cpu").encode("hello")
    np.testing.assert_allclose(vector / np.linalg.norm(vector), expected, atol=1e-5)
    assert runner.facts.embedding_size == 16


def test_layer_norm_module_equals_sentence_transformers(own_bert: Path) -> None:
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import LayerNorm, Normalize

    model, norm = SentenceTransformer(str(own_bert), device="cpu"), LayerNorm(32)
    torch.nn.init.uniform_(norm.norm.weight, 0.5, 1.5)
    folder = own_bert.parent / "with norm"
    SentenceTransformer(modules=[model[0], model[1], norm, Normalize()], device="cpu").save(str(folder))
    batch = pack([Entry(0, Kind.EMBED, np.array(model.tokenizer("hello")["input_ids"], np.int32))])
    ((vector,),) = load(folder).run(batch)
    expected = SentenceTransformer(str(folder), device="cpu").encode("hello")
    np.testing.assert_allclose(vector / np.linalg.norm(vector), expected, atol=1e-5)


def test_dense_modules_leave_token_vectors_alone(own_bert: Path) -> None:
    write_dense(own_bert, in_features=32)
    ((rows,), *_) = load(own_bert).run(pack(entries(Kind.EMBED_ALL)))
    assert rows.shape == (3, 32)


def test_dense_module_of_another_size_is_refused(own_bert: Path) -> None:
    write_dense(own_bert, in_features=31)
    with pytest.raises(StartupError, match="do not fit"):
        load(own_bert)


def write_dense(folder: Path, *, in_features: int) -> None:
    config = {"in_features": in_features, "out_features": 8, "bias": False}
    (folder / "2_Dense").mkdir()
    (folder / "2_Dense" / "config.json").write_text(json.dumps(config))
    save_file({"linear.weight": torch.zeros(8, in_features)}, folder / "2_Dense" / "model.safetensors")
    modules = json.loads((folder / "modules.json").read_text())
    modules[2] |= {"path": "2_Dense", "type": "sentence_transformers.models.Dense"}
    (folder / "modules.json").write_text(json.dumps(modules))
