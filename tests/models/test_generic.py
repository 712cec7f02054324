"""The generic path: any architecture that transformers knows, with the promises that families of ours make."""

import logging
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from tei_grpc import models
from tei_grpc.engine.batch import pack
from tei_grpc.errors import StartupError
from tei_grpc.models import model_types, register
from tei_grpc.models.bert import Bert
from tei_grpc.types import Entry, Kind
from tests.checkpoints import ROWS, bert_t
from tests.models.architectures import ARCHITECTURES, edit_config, edit_tensors, make_architecture
from tests.models.conftest import MakeArchitecture, MakeCheckpoint
from tests.models.runners import TEXTS, load_runner, normalized, random_ids, run

NEVER_16_BITS = ["fnet", "xlnet"]
WITH_CLASSIFIER = [name for name in ARCHITECTURES if name != "t5"]
WITH_MASKED_LM = [
    *("albert", "electra", "mobilebert", "fnet", "rembert", "funnel"),
    *("big_bird", "longformer", "roformer"),
]


def texts_of(name: str) -> list[np.ndarray]:
    """Funnel fails on texts of one or two tokens in transformers, too."""
    return TEXTS[2:] if name == "funnel" else TEXTS


def reference(folder: Path, auto: type, texts: list[np.ndarray]) -> list[np.ndarray]:
    """First output of transformers for each text alone: [tokens, hidden], or [labels].

    BigBird changes its attention for good at the first short text: the long texts go first.
    """
    model = auto.from_pretrained(folder).eval()
    with torch.inference_mode():
        outputs = [model(torch.from_numpy(text[None]).long())[0][0].numpy() for text in reversed(texts)]
    return outputs[::-1]


def encoder_class(name: str) -> type:
    return transformers.T5EncoderModel if name == "t5" else transformers.AutoModel


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_token_vectors_equal_transformers(architecture: MakeArchitecture, name: str) -> None:
    expected = reference(architecture(name), encoder_class(name), texts_of(name))
    found = run(load_runner(architecture(name)), Kind.EMBED_ALL, texts_of(name))
    for (vectors,), hidden in zip(found, expected, strict=True):
        np.testing.assert_allclose(vectors, hidden, atol=1e-4, rtol=0)
        np.testing.assert_allclose(normalized(vectors), normalized(hidden), atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", WITH_CLASSIFIER)
def test_logits_equal_transformers(architecture: MakeArchitecture, name: str) -> None:
    folder, texts = architecture(name, "ForSequenceClassification"), texts_of(name)
    expected = reference(folder, transformers.AutoModelForSequenceClassification, texts)
    for (found,), logits in zip(run(load_runner(folder), Kind.PREDICT, texts), expected, strict=True):
        np.testing.assert_allclose(found, logits, atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", WITH_MASKED_LM)
def test_splade_weights_equal_the_formula_on_transformers_logits(architecture: MakeArchitecture, name: str) -> None:
    folder, texts = architecture(name, "ForMaskedLM"), texts_of(name)
    expected = reference(folder, transformers.AutoModelForMaskedLM, texts)
    found = run(load_runner(folder, pooling="splade"), Kind.EMBED, texts)
    for (weights,), logits in zip(found, expected, strict=True):
        np.testing.assert_allclose(weights, np.log1p(np.maximum(logits, 0)).max(0), atol=1e-4, rtol=0)


@pytest.mark.parametrize("head", ["", "ForSequenceClassification", "ForMaskedLM"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_text_in_a_mixed_batch_gets_what_it_gets_alone(architecture: MakeArchitecture, name: str, head: str) -> None:
    if (head == "ForSequenceClassification" and name not in WITH_CLASSIFIER) or (
        head == "ForMaskedLM" and name not in WITH_MASKED_LM
    ):
        pytest.skip(f"{name} has no such head")
    runner = load_runner(architecture(name, head), pooling="splade" if head == "ForMaskedLM" else None)
    kind = Kind.PREDICT if head == "ForSequenceClassification" else Kind.EMBED
    together = run(runner, kind, [*texts_of(name), *random_ids(7, 8, 25, 26, seed=1)])
    for text, (found,) in zip(texts_of(name), together, strict=False):
        ((alone,),) = run(runner, kind, [text])
        np.testing.assert_allclose(found, alone, atol=1e-5, rtol=0)
        if kind is Kind.EMBED:
            np.testing.assert_allclose(normalized(found), normalized(alone), atol=1e-6, rtol=0)


@pytest.mark.parametrize("name", ["albert", "longformer", "t5", "gpt2", "xlnet"])
def test_longest_text_is_not_padded_beyond_the_positions(architecture: MakeArchitecture, name: str) -> None:
    texts = random_ids(130, 129)
    expected = reference(architecture(name), encoder_class(name), texts)
    for (found,), hidden in zip(run(load_runner(architecture(name)), Kind.EMBED_ALL, texts), expected, strict=True):
        np.testing.assert_allclose(found, hidden, atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", ["albert", "t5", "gpt2"])
def test_bfloat16_stays_close_to_transformers_in_float32(architecture: MakeArchitecture, name: str) -> None:
    expected = reference(architecture(name), encoder_class(name), TEXTS)
    found = run(load_runner(architecture(name), dtype="bfloat16"), Kind.EMBED_ALL, TEXTS)
    for (vectors,), hidden in zip(found, expected, strict=True):
        assert np.min(np.sum(normalized(vectors) * normalized(hidden), axis=-1)) >= 0.999


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_texts_are_padded_only_where_that_changes_nothing(
    architecture: MakeArchitecture, name: str, dtype: str
) -> None:
    if name in NEVER_16_BITS and dtype != "float32":
        pytest.skip("refused")
    mixes = name in ("fnet", "funnel", "mobilebert", "big_bird")
    assert load_runner(architecture(name), dtype=dtype)._model.pads is not mixes


@pytest.mark.parametrize("name", NEVER_16_BITS)
def test_architecture_that_cannot_run_in_16_bits_is_refused(architecture: MakeArchitecture, name: str) -> None:
    with pytest.raises(StartupError, match="of transformers cannot run a plain text in bfloat16: .*BFloat16"):
        load_runner(architecture(name), dtype="bfloat16")


def test_text_that_16_bits_are_too_small_for_is_answered_in_float32(albert: Path) -> None:
    def enlarge(tensors: dict[str, torch.Tensor]) -> None:
        for name in tensors:
            if "ffn.weight" in name or "ffn_output.weight" in name:
                tensors[name] *= 3000

    edit_tensors(albert, enlarge)
    ((expected,),) = run(load_runner(albert), Kind.EMBED, TEXTS[2:3])
    runner = load_runner(albert, dtype="float16")
    ((found,),) = run(runner, Kind.EMBED, TEXTS[2:3])
    assert runner.recoveries == 1
    assert np.sum(normalized(found) * normalized(expected)) >= 0.999


def test_token_types_reach_a_model_that_counts_them(architecture: MakeArchitecture) -> None:
    folder = architecture("electra", "ForSequenceClassification")
    ids, types = np.array([2, 82, 3, 83, 3], np.int32), np.array([0, 0, 0, 1, 1], np.int32)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder).eval()
    with torch.inference_mode():
        expected = model(torch.from_numpy(ids).long()[None], token_type_ids=torch.from_numpy(types).long()[None])[0][0]
    ((logits,),) = load_runner(folder).run(pack([Entry(0, Kind.PREDICT, ids, types)]))
    np.testing.assert_allclose(logits, expected, atol=1e-4, rtol=0)


def test_classifier_without_a_pad_token_takes_one_text_at_a_time(tmp_path: Path) -> None:
    folder = make_architecture("gpt2", tmp_path, "ForSequenceClassification", pad_token_id=None)
    expected = reference(folder, transformers.AutoModelForSequenceClassification, TEXTS)
    for (found,), logits in zip(run(load_runner(folder), Kind.PREDICT, TEXTS), expected, strict=True):
        np.testing.assert_allclose(found, logits, atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", [name for name in ROWS if name != "llama-dynamic-rope"])
def test_both_paths_give_the_same(checkpoint: MakeCheckpoint, name: str) -> None:
    kind, options = Kind.EMBED_ALL, {}
    if ROWS[name].model.endswith("ForSequenceClassification"):
        kind = Kind.PREDICT
    elif ROWS[name].model.endswith("ForMaskedLM"):
        kind, options = Kind.EMBED, {"pooling": "splade"}
    packed = run(load_runner(checkpoint(name), **options), kind, TEXTS[:-1])
    generic = run(load_runner(checkpoint(name), force_generic=True, **options), kind, TEXTS[:-1])
    for (found,), (same,) in zip(packed, generic, strict=True):
        np.testing.assert_allclose(found, same, atol=1e-4, rtol=0)
        if kind is Kind.EMBED_ALL:
            np.testing.assert_allclose(normalized(found), normalized(same), atol=1e-5, rtol=0)


def test_rope_that_remembers_long_texts_is_refused(checkpoint: MakeCheckpoint) -> None:
    with pytest.raises(StartupError, match="`rope_type` dynamic"):
        load_runner(checkpoint("llama-dynamic-rope"), force_generic=True)


def test_facts_say_which_path_runs(checkpoint: MakeCheckpoint, albert: Path) -> None:
    assert load_runner(checkpoint("bert-t")).facts.optimized
    assert not load_runner(checkpoint("bert-t"), force_generic=True).facts.optimized
    assert not load_runner(albert).facts.optimized


def test_log_says_which_path_runs_and_why(
    checkpoint: MakeCheckpoint, albert: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    load_runner(checkpoint("bert-t"))
    load_runner(checkpoint("bert-t"), force_generic=True)
    load_runner(albert)
    packed, forced, unknown = (message for message in caplog.messages if "path" in message)
    assert packed == "`model_type` bert runs on the packed path, as Bert"
    assert forced.startswith("`model_type` bert runs on the generic path: `--force-generic`")
    assert unknown.startswith("`model_type` albert runs on the generic path: no family of ours serves it")


def test_family_that_is_entered_later_takes_over(
    architecture: MakeArchitecture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model_types()
    monkeypatch.setattr(models, "_entries", list(models._entries))
    folder = edit_config(bert_t(tmp_path), model_type="albert")

    @register("albert")
    class Later(Bert): ...

    assert load_runner(folder).facts.optimized


def test_family_of_ours_needs_no_transformers(checkpoint: MakeCheckpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = checkpoint("bert-t")
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert load_runner(folder).facts.optimized
