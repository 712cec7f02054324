"""A whole model on its way through a CUDA device, on a CPU: graphs, kernels, batches ahead, recoveries."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, library

from tei_grpc.engine.batch import pack
from tei_grpc.engine.compiled import Compiled
from tei_grpc.engine.pipeline import Mark
from tei_grpc.engine.runner import Runner
from tei_grpc.errors import StartupError
from tei_grpc.layers.flex import BLOCK
from tei_grpc.layers.kernels import BY_GROUP, Kernels
from tei_grpc.layers.packed import PackedInputs, place
from tei_grpc.types import Batch, Entry, Kind
from tests import stand_ins
from tests.models.conftest import MakeCheckpoint
from tests.models.formats import FORMATS
from tests.models.runners import load_runner, normalized, random_ids, run
from tests.models.test_float16 import LOUD, scale_token
from tests.pipelines import SHAPE, CudaStandIn, cuda_stand_in

SMALL, LARGE = random_ids(3, 9, 30), random_ids(40, 80, 100)
CPU = torch.device("cpu")


@pytest.fixture
def runner(checkpoint: MakeCheckpoint) -> Runner:
    loaded = load_runner(checkpoint("bert-mean"), cuda_stand_in, dtype="bfloat16")
    loaded.warm_up()
    return loaded


def batch(texts: list[np.ndarray], kind: Kind = Kind.EMBED):
    return pack([Entry(row, kind, text) for row, text in enumerate(texts)])


def test_facts_name_the_kernels(runner: Runner) -> None:
    assert runner.facts.kernels == "varlen_attn"


@pytest.mark.parametrize(("name", "kernels"), [("deberta", "flex_attention"), ("mistral", "flex_attention")])
def test_what_flash_attention_does_not_take_stays_packed(checkpoint: MakeCheckpoint, name: str, kernels: str) -> None:
    loaded = load_runner(checkpoint(name), cuda_stand_in, dtype="bfloat16")
    loaded.warm_up()
    assert loaded.facts.kernels == kernels


def test_small_batches_run_as_graphs_and_large_ones_by_themselves(runner: Runner) -> None:
    assert runner._pipeline.graphs.find(batch(SMALL)) == SHAPE
    assert runner._pipeline.graphs.find(batch(LARGE)) is None


def test_batches_that_are_under_way_together_do_not_disturb_each_other(runner: Runner) -> None:
    batches = [batch(SMALL), batch(LARGE), batch(SMALL[:1]), batch(SMALL, Kind.EMBED_ALL)]
    started = [runner.launch(each) for each in batches]
    together = [each.collect() for each in started]
    for found, each in zip(together, batches, strict=True):
        for (vector,), (expected,) in zip(found, runner.run(each), strict=True):
            np.testing.assert_array_equal(vector, expected)


def test_device_works_before_anybody_asks_for_answers(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = []
    monkeypatch.setattr(CudaStandIn, "fetch", lambda self, values: steps.append("fetch") or values)
    monkeypatch.setattr(CudaStandIn, "mark", lambda self: Mark(lambda: steps.append("wait"), lambda: True))
    started = runner.launch(batch(SMALL))
    assert steps == ["fetch"]
    started.collect()
    assert steps == ["fetch", "wait"]


def test_input_that_overflows_float16_is_answered_in_float32(checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    folder = scale_token(checkpoint("bert-mean"), tmp_path, 40000.0)
    loud, quiet = np.array([2, LOUD, LOUD, 3], np.int32), SMALL[1]
    ((expected,),) = run(load_runner(folder), Kind.EMBED, [loud])
    loaded = load_runner(folder, cuda_stand_in, dtype="float16")
    loaded.warm_up()
    (neighbour,), (found,) = run(loaded, Kind.EMBED, [quiet, loud])
    assert loaded.recoveries == 1
    assert float(normalized(found) @ normalized(expected)) >= 0.9999
    ((alone,),) = run(loaded, Kind.EMBED, [quiet])
    np.testing.assert_allclose(neighbour, alone, atol=2e-3)


def test_model_of_transformers_runs_without_kernels_of_ours(checkpoint: MakeCheckpoint) -> None:
    loaded = load_runner(checkpoint("bert-mean"), cuda_stand_in, force_generic=True)
    loaded.warm_up()
    assert loaded.facts.kernels == "transformers"
    for (found,), (expected,) in zip(
        run(loaded, Kind.EMBED, LARGE), run(load_runner(checkpoint("bert-mean")), Kind.EMBED, LARGE), strict=True
    ):
        np.testing.assert_allclose(found, expected, atol=1e-5)


def test_lack_of_memory_for_the_first_batch_is_not_laid_to_the_config(
    checkpoint: MakeCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: CudaStandIn, batch: object, *, plain: bool = False) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(CudaStandIn, "encode", full)
    with pytest.raises(StartupError, match="`--max-batch-tokens`.* does not fit into the memory of cpu"):
        load_runner(checkpoint("bert-mean"), cuda_stand_in).warm_up()


def test_warm_up_runs_more_than_a_block_of_rows_and_less(checkpoint: MakeCheckpoint) -> None:
    """What is compiled for sizes that vary is compiled once more for a size of 1."""
    loaded, seen = load_runner(checkpoint("deberta"), cuda_stand_in), []
    run_as_it_is = loaded.run
    loaded.run = lambda batch: seen.append(len(batch.input_ids)) or run_as_it_is(batch)
    loaded.warm_up()
    assert max(seen) > BLOCK >= min(seen)


def test_kernels_are_proven_with_texts_whose_tokens_differ(checkpoint: MakeCheckpoint) -> None:
    """With rotary positions equal tokens have equal values, so that it would not matter which are seen."""

    class Blind:
        name = "sees all texts"

        def __call__(self, query: Tensor, key_value: tuple[Tensor, Tensor], *_: object, **options: object) -> Tensor:
            return key_value[1].mean(0).expand(len(query), -1, -1).flatten(1)

    loaded = load_runner(checkpoint("nomic"), cuda_stand_in, dtype="bfloat16")
    loaded._pipeline._attend = Kernels(torch.bfloat16, None, Blind)
    loaded.warm_up()
    assert loaded.facts.kernels == BY_GROUP


def test_lack_of_memory_at_warm_up_names_the_option_to_lower(
    checkpoint: MakeCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: CudaStandIn, longest: int) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(CudaStandIn, "warm_up", full)
    loaded = load_runner(checkpoint("bert-mean"), cuda_stand_in, max_batch_tokens=999)
    with pytest.raises(StartupError, match=r"`--max-batch-tokens`.* a batch of 999 tokens does not fit .*lower it"):
        loaded.warm_up()


def test_largest_batch_holds_all_tokens_that_it_may_for_every_kind(checkpoint: MakeCheckpoint) -> None:
    loaded, seen = load_runner(checkpoint("bert-mean"), cuda_stand_in, max_batch_tokens=300), []
    run_as_it_is = loaded.run
    loaded.run = lambda batch: seen.append((batch.entries[0].kind, len(batch.input_ids))) or run_as_it_is(batch)
    loaded._run_largest()
    assert set(seen) == {(Kind.EMBED, 300), (Kind.EMBED_ALL, 300)}


@library.custom_op("tests::varlen", mutates_args=())
def opaque(query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, longest: int, scale: float) -> Tensor:
    """As torch's own kernel: nothing that a compiler looks into."""
    return stand_ins.varlen_attn(query, key, value, bounds, bounds, longest, longest, scale=scale)


@opaque.register_fake
def _(query: Tensor, *_: object) -> Tensor:
    return torch.empty_like(query)


def test_encoder_is_compiled_once_for_all_batches(runner: Runner) -> None:
    """By torch's tracer alone, which decides that; the code that a CUDA device would get is not made."""
    torch._dynamo.reset()
    made = []

    def count(module: torch.fx.GraphModule, _: object):
        made.append(module)
        return module.forward

    def attend(query, key_value, inputs, *, scale, mask):
        return opaque(query, *key_value, inputs.cu_seqlens, inputs.max_seqlen, scale).flatten(1)

    compiled = Compiled(runner._model.encode, 90, backend=count)
    with torch.inference_mode():
        compiled.prove(lambda batch, blank: place(batch, CPU, attend=attend), longest=100)
        compiled(place(batch(random_ids(128, 3, 4, 5, 99)), CPU, attend=attend))
    assert len(made) == 1


def test_compiled_encoder_that_is_wrong_is_refused(runner: Runner) -> None:
    compiled = Compiled(runner._model.encode, 90, backend="eager")
    compiled._compiled = lambda inputs: runner._model.encode(inputs) * 1.5
    with pytest.raises(StartupError, match=r"`--torch-compile`: the compiled model is 0.5 off"), torch.inference_mode():
        compiled.prove(lambda batch, blank: place(batch, CPU, attend=runner._pipeline._attend), longest=100)


@pytest.mark.parametrize("longest", [1, 8, 56, 57, 100])
def test_compiled_encoder_is_proven_with_texts_that_the_model_takes(runner: Runner, longest: int) -> None:
    compiled, seen = Compiled(runner._model.encode, 90, backend="eager"), []
    compiled._compiled = runner._model.encode

    def place_seen(batch: Batch, blank: object) -> PackedInputs:
        seen.append(batch.max_seqlen)
        return place(batch, CPU, attend=runner._pipeline._attend)

    with torch.inference_mode():
        compiled.prove(place_seen, longest)
    assert max(seen) <= longest


def test_encoder_that_cannot_be_compiled_is_refused(runner: Runner) -> None:
    compiled = Compiled(runner._model.encode, 90, backend="eager")
    compiled._compiled = lambda inputs: 1 / 0
    with pytest.raises(StartupError, match="`--torch-compile`: this model cannot be compiled here: ZeroDivisionError"):
        compiled.prove(lambda batch, blank: place(batch, CPU, attend=runner._pipeline._attend), longest=100)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
@pytest.mark.parametrize(
    "name", ["bert-mean", "deberta", "modernbert", "mistral-window", "qwen3", "gemma3", "mpnet", "nomic-experts"]
)
def test_vectors_of_the_device_are_close_to_those_of_the_cpu(
    checkpoint: MakeCheckpoint, tmp_path: Path, name: str
) -> None:
    if name in FORMATS:
        FORMATS[name](tmp_path)
    folder = tmp_path if name in FORMATS else checkpoint(name)
    loaded = load_runner(folder, device="cuda", pooling="mean")
    loaded.warm_up()
    expected = run(load_runner(folder, device="cpu", pooling="mean"), Kind.EMBED, SMALL)
    for (found,), (vector,) in zip(run(loaded, Kind.EMBED, SMALL), expected, strict=True):
        assert float(normalized(found) @ normalized(vector)) >= 0.999
