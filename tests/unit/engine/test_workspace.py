"""The memory formula, what is said of it, and where limits are read."""

import logging
import os
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from tei_grpc.engine import workspace as module
from tei_grpc.engine.workspace import MIB, Watch, Workspace, limit_bytes, report, workspace
from tei_grpc.loading.model_config import ModelConfig
from tei_grpc.types import Pooling

QWEN3 = {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 3072}
PLAIN = {"num_attention_heads": 12, "intermediate_size": 3072}


def bytes_of(config: dict[str, object], hidden: int, tokens: int, *, dtype: str, pooling: str = "cls") -> int:
    """The formula for a model of which only this is known."""
    model = SimpleNamespace(hf_config=config, pooling=(Pooling(pooling),))
    return workspace(cast(ModelConfig, model), hidden, dtype).bytes(tokens)


def test_decoder_takes_what_the_docs_work_out_for_it() -> None:
    assert bytes_of(QWEN3, 1024, 4096, dtype="bfloat16") == 288 * MIB
    assert bytes_of(QWEN3, 1024, 16384, dtype="int8") == 864 * MIB


def test_heads_have_their_share_of_hidden_where_the_config_does_not_say() -> None:
    full = PLAIN | {"head_dim": 64, "num_key_value_heads": 12}
    assert bytes_of(PLAIN, 768, 512, dtype="float32") == bytes_of(full, 768, 512, dtype="float32")


def test_logits_over_the_vocabulary_do_not_grow_with_tokens() -> None:
    for tokens in (1, 9999):
        splade, cls = (bytes_of(PLAIN, 768, tokens, dtype="float32", pooling=each) for each in ("splade", "cls"))
        assert splade - cls == 160 * MIB


@pytest.mark.parametrize("text", ["max\n", "9223372036854771712\n"])
def test_no_limit_means_all_of_the_machine(tmp_path: Path, text: str) -> None:
    (tmp_path / "memory.max").write_text(text)
    assert limit_bytes((tmp_path / "memory.max",)) == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def test_limit_of_the_container_is_read(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text("1048576\n")
    assert limit_bytes((tmp_path / "absent", tmp_path / "memory.max")) == MIB


def test_watch_sees_memory_that_is_gone_again() -> None:
    watch = Watch()
    bytes_taken = bytearray(b"x") * (100 * MIB)
    del bytes_taken
    assert 90 * MIB < watch.peak < 150 * MIB


@pytest.fixture
def warned(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.WARNING)
    return caplog


def test_model_that_fits_is_no_reason_to_warn(warned: pytest.LogCaptureFixture) -> None:
    report(Workspace(per_token=1, fixed=64 * MIB), Watch(), tried=10, most=20)
    assert warned.messages == []


def test_batch_that_does_not_fit_the_limit_names_the_option(
    warned: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "limit_bytes", lambda: 10 * MIB)
    report(Workspace(per_token=MIB, fixed=64 * MIB), Watch(), tried=1, most=100)
    [text] = warned.messages
    assert "10 MiB" in text
    assert "`--max-batch-tokens` (MAX_BATCH_TOKENS)" in text


def test_batch_that_took_more_than_the_formula_is_a_warning(warned: pytest.LogCaptureFixture) -> None:
    watch = Watch()
    bytes_taken = bytearray(b"x") * (20 * MIB)
    report(Workspace(per_token=1, fixed=0), watch, tried=10, most=20)
    del bytes_taken
    [text] = warned.messages
    assert text.startswith("batches of up to 10 tokens took")
