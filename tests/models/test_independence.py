"""What a text gets does not depend on the texts that share its batch."""

import numpy as np
import pytest

from tei_grpc.types import Kind
from tests.checkpoints import ROWS
from tests.models.conftest import Load, MakeCheckpoint
from tests.models.runners import load_runner, normalized, random_ids, run

TEXT = random_ids(11, seed=1)[0]
MATES = random_ids(*range(1, 32))


def kind_and_options(name: str) -> tuple[Kind, dict[str, object]]:
    model = ROWS[name].model
    if model.endswith("ForSequenceClassification"):
        return Kind.PREDICT, {}
    return (Kind.EMBED, {"pooling": "splade"}) if model.endswith("ForMaskedLM") else (Kind.EMBED, {})


@pytest.mark.parametrize("name", ROWS)
def test_text_in_a_mixed_batch_gets_what_it_gets_alone(checkpoint: MakeCheckpoint, load: Load, name: str) -> None:
    kind, options = kind_and_options(name)
    runner = load(checkpoint(name), **options)
    ((alone,),) = run(runner, kind, [TEXT])
    for place in (0, 15, 31):
        (together,) = run(runner, kind, [*MATES[:place], TEXT, *MATES[place:]])[place]
        np.testing.assert_allclose(together, alone, atol=1e-5, rtol=0)
        if kind is Kind.EMBED:
            np.testing.assert_allclose(normalized(together), normalized(alone), atol=1e-6, rtol=0)


def test_token_vectors_and_pooled_vectors_share_a_batch(checkpoint: MakeCheckpoint) -> None:
    runner = load_runner(checkpoint("bert-mean"))
    kinds = [Kind.EMBED, Kind.EMBED_ALL, Kind.EMBED, Kind.EMBED_ALL]
    texts = random_ids(3, 9, 40, 1)
    alone = [run(runner, kind, [text])[0][0] for kind, text in zip(kinds, texts, strict=True)]
    for (together,), single in zip(run(runner, kinds, texts), alone, strict=True):
        np.testing.assert_allclose(together, single, atol=1e-5, rtol=0)


def test_sparse_and_vocabulary_vectors_share_a_batch(checkpoint: MakeCheckpoint) -> None:
    runner = load_runner(checkpoint("mlm-t"), pooling="splade")
    (dense,), (indices, values) = run(runner, [Kind.EMBED, Kind.EMBED_SPARSE], [TEXT, TEXT])
    assert np.count_nonzero(dense) == len(indices)
    np.testing.assert_allclose(dense[indices], values, atol=1e-5, rtol=0)
