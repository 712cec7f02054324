"""Packed decoder against transformers' padded SDPA: 12 layers of hidden size 1,024, texts of 16 to 512 tokens.

    python benchmarks/decoder.py [--texts 16] [--rounds 5] [--dtype float32 bfloat16] [--sorted]

Random weights, the same in both. Each round runs both on the same texts, in turns, so that what else the machine does
hits both; the medians count. transformers gets the texts as they come, or sorted by length, in padded batches of eight.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import transformers

from tei_grpc.config import EngineConfig
from tei_grpc.engine.batch import pack
from tei_grpc.engine.runner import Runner
from tei_grpc.loading.model_config import read_model_config
from tei_grpc.types import Entry, Ints, Kind

VOCABULARY = 8192
CONFIG = {
    "vocab_size": VOCABULARY,
    "hidden_size": 1024,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "intermediate_size": 3072,
    "max_position_embeddings": 1024,
    "pad_token_id": 0,
}
PADDED_BATCH = 8


def main() -> None:
    """Print tokens per second of both, and their ratio, for each dtype."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--texts", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sorted", action="store_true")
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"])
    arguments = parser.parse_args()
    transformers.logging.disable_progress_bar()
    lengths = np.linspace(16, 512, arguments.texts).astype(int)
    if not arguments.sorted:
        np.random.default_rng(0).shuffle(lengths)
    texts = [np.random.default_rng(0).integers(1, VOCABULARY, length, dtype=np.int32) for length in lengths]
    print(f"{len(texts)} texts, {sum(lengths)} tokens, {torch.get_num_threads()} threads")
    with tempfile.TemporaryDirectory() as folder:
        save(Path(folder))
        for dtype in arguments.dtype:
            report(dtype, compare(Path(folder), dtype, texts, arguments.rounds), int(sum(lengths)))


def save(folder: Path) -> None:
    """A Qwen3 with random weights, as transformers initialises them."""
    torch.manual_seed(0)
    transformers.Qwen3Model(transformers.Qwen3Config(**CONFIG)).save_pretrained(folder)
    (folder / "tokenizer_config.json").write_text(json.dumps({"model_max_length": 1024}))


def compare(folder: Path, dtype: str, texts: list[Ints], rounds: int) -> tuple[list[float], list[float]]:
    """Seconds of each round, packed and padded; raises AssertionError when their vectors differ."""
    config = EngineConfig(model_id=str(folder), pooling="last-token", dtype=dtype)
    runner = Runner(read_model_config(folder, config), config)
    model = transformers.AutoModel.from_pretrained(folder, dtype=getattr(torch, dtype), attn_implementation="sdpa")
    batch = pack([Entry(row, Kind.EMBED, text) for row, text in enumerate(texts)])
    packed, padded = (lambda: np.stack([answer[0] for answer in runner.run(batch)])), (lambda: run_padded(model, texts))
    check(packed(), padded())
    seconds = [(_seconds(packed), _seconds(padded)) for _ in range(rounds)]
    return [ours for ours, _ in seconds], [theirs for _, theirs in seconds]


def run_padded(model: torch.nn.Module, texts: list[Ints]) -> np.ndarray:
    """Last-token vectors, [texts, hidden] float32."""
    found = []
    with torch.inference_mode():
        for start in range(0, len(texts), PADDED_BATCH):
            some = texts[start : start + PADDED_BATCH]
            ids = torch.zeros(len(some), max(map(len, some)), dtype=torch.long)
            for row, text in enumerate(some):
                ids[row, : len(text)] = torch.from_numpy(text)
            hidden = model(input_ids=ids, attention_mask=(ids != 0).long(), use_cache=False).last_hidden_state
            found += [hidden[row, len(text) - 1].float().numpy() for row, text in enumerate(some)]
    return np.stack(found)


def check(ours: np.ndarray, theirs: np.ndarray) -> None:
    """Both computed the same, within what 16-bit numbers allow."""
    cosines = (ours * theirs).sum(1) / np.linalg.norm(ours, axis=1) / np.linalg.norm(theirs, axis=1)
    if cosines.min() < 0.999:
        raise AssertionError(f"vectors differ: smallest cosine {cosines.min()}")


def report(dtype: str, seconds: tuple[list[float], list[float]], tokens: int) -> None:
    """One line."""
    packed, padded = (statistics.median(each) for each in seconds)
    print(
        f"{dtype:9s} packed {tokens / packed:8.0f} tokens/s, padded SDPA {tokens / padded:8.0f} tokens/s, "
        f"ratio {padded / packed:.2f}",
        flush=True,
    )


def _seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
