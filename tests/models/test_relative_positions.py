"""Buckets of relative positions, at the sizes of the published models and for every distance they meet."""

import json
from pathlib import Path

import pytest
import torch
from transformers.models.deberta_v2.modeling_deberta_v2 import make_log_bucket_position
from transformers.models.mpnet.modeling_mpnet import MPNetEncoder

from tei_grpc.errors import StartupError
from tei_grpc.layers.disentangled import Buckets
from tei_grpc.models.mpnet import bucket
from tests.models.conftest import MakeCheckpoint
from tests.models.runners import load_runner

DISTANCES = torch.arange(-700, 701)  # key - query


def test_mpnet_bucket_equals_transformers() -> None:
    assert bucket(DISTANCES).tolist() == MPNetEncoder.relative_position_bucket(DISTANCES).tolist()


@pytest.mark.parametrize(("buckets", "longest"), [(256, 512), (8, 132), (32, 24), (256, 1680)])
def test_deberta_bucket_equals_transformers(buckets: int, longest: int) -> None:
    config = {"position_buckets": buckets, "max_relative_positions": -1, "max_position_embeddings": longest}
    expected = make_log_bucket_position(-DISTANCES, buckets, longest).long()
    assert Buckets.read(config)(DISTANCES).tolist() == (expected + buckets).clamp(0, 2 * buckets - 1).tolist()


def test_deberta_without_buckets_counts_up_to_the_longest_distance() -> None:
    found = Buckets.read({"max_relative_positions": 3, "max_position_embeddings": 512})
    assert found(torch.arange(-5, 6)).tolist() == [5, 5, 5, 5, 4, 3, 2, 1, 0, 0, 0]


@pytest.mark.parametrize(
    ("key", "value"), [("pos_att_type", "c2p|p2p"), ("norm_rel_ebd", "rms_norm"), ("conv_kernel_size", 2)]
)
def test_deberta_config_that_asks_for_something_else_is_refused(
    checkpoint: MakeCheckpoint, tmp_path: Path, key: str, value: object
) -> None:
    source = checkpoint("deberta")
    for file in source.iterdir():
        if file.is_file():
            (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((source / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, key: value}))
    with pytest.raises(StartupError, match=f"`{key}` {value!r} in config.json is not supported".replace("|", r"\|")):
        load_runner(tmp_path, pooling="mean")
