"""16-bit weights: float16 stays close, and what it is too small for is computed again in float32."""

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from tei_grpc.engine.batch import pack
from tei_grpc.errors import InferenceError
from tei_grpc.layers.precision import Float32
from tei_grpc.types import Entry, Kind
from tests.checkpoints import ROWS
from tests.models.conftest import MakeCheckpoint
from tests.models.runners import load_runner, normalized, random_ids, reference, run

TEXTS = random_ids(1, 7, 25, 33)
LOUD = 7  # a token whose vector float16 cannot carry
ENCODERS = [name for name, row in ROWS.items() if row.pooling]


def scale_token(folder, tmp_path, value):
    """A copy of a BERT checkpoint in which the vectors of one token and of the first token type reach `value`."""
    tensors = load_file(folder / "model.safetensors")
    tensors["embeddings.word_embeddings.weight"][LOUD] = torch.linspace(-value, value, 32)
    tensors["embeddings.token_type_embeddings.weight"][0] = torch.linspace(-value, value, 32).clamp(-6e4, 6e4)
    for file in folder.iterdir():
        if file.is_file():
            (tmp_path / file.name).write_bytes(file.read_bytes())
    save_file(tensors, tmp_path / "model.safetensors")
    return tmp_path


@pytest.mark.parametrize("name", ENCODERS)
def test_float16_stays_close_to_transformers_in_float32(checkpoint: MakeCheckpoint, name: str) -> None:
    model = transformers.AutoModel.from_pretrained(checkpoint(name), attn_implementation="eager").eval()
    runner = load_runner(checkpoint(name), dtype="float16")
    for (found,), hidden in zip(run(runner, Kind.EMBED_ALL, TEXTS), reference(model, TEXTS), strict=True):
        assert found.dtype == np.float32
        assert np.min(np.sum(normalized(found) * normalized(hidden), axis=-1)) >= 0.9995


@pytest.mark.parametrize("name", ENCODERS)
def test_16_bit_weights_in_float32_equal_transformers_with_the_same_weights(
    checkpoint: MakeCheckpoint, name: str
) -> None:
    model = transformers.AutoModel.from_pretrained(checkpoint(name), attn_implementation="eager").eval()
    runner = load_runner(checkpoint(name), dtype="bfloat16")
    runner.warm_up()
    with Float32():
        answers = run(runner, Kind.EMBED_ALL, TEXTS)
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16().float()
    for (found,), hidden in zip(answers, reference(model, TEXTS), strict=True):
        np.testing.assert_allclose(found, hidden, atol=1e-4, rtol=0)


def test_input_that_overflows_float16_is_answered_in_float32(checkpoint: MakeCheckpoint, tmp_path) -> None:
    folder = scale_token(
        checkpoint("bert-mean"), tmp_path, 40000.0
    )  # float16 ends at 65504, less than the sum of the two
    loud, quiet = np.array([2, LOUD, LOUD, 3], np.int32), TEXTS[1]
    ((expected,),) = run(load_runner(folder), Kind.EMBED, [loud])
    runner = load_runner(folder, dtype="float16")
    (neighbour,), (found,) = run(runner, Kind.EMBED, [quiet, loud])
    assert runner.recoveries == 1
    assert float(normalized(found) @ normalized(expected)) >= 0.9999
    ((alone,),) = run(runner, Kind.EMBED, [quiet])
    np.testing.assert_array_equal(neighbour, alone)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_input_that_overflows_float32_fails_alone(checkpoint: MakeCheckpoint, tmp_path, dtype: str) -> None:
    runner = load_runner(scale_token(checkpoint("bert-mean"), tmp_path, 1e30), dtype=dtype)
    entries = [Entry(0, Kind.EMBED, np.array([2, LOUD, 3], np.int32)), Entry(1, Kind.EMBED, TEXTS[1])]
    failed, (answered,) = runner.run(pack(entries))
    assert isinstance(failed, InferenceError)
    assert np.isfinite(answered).all()
