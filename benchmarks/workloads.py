"""The texts that every benchmark runs, and the checkpoints that it runs them on.

Q is queries, P passages, L texts as long as the model takes. Texts are whole words of the model's vocabulary, drawn
from a fixed seed, so that a text of n tokens is n - 2 words and everybody who tokenizes it sees the same n.
"""

import json
import math
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file
from tokenizers import Tokenizer

MODELS = Path(__file__).resolve().parents[1] / ".models"
MINILM = MODELS / "all-MiniLM-L6-v2"
LIMIT = 512  # tokens; all-MiniLM-L6-v2 as published stops at 256
SEED = 0
BERT_BASE = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072}

Floats = NDArray[np.float32]


class Workload(NamedTuple):
    """Lengths in tokens, special ones included: lognormal, cut at both ends; and how many texts are a fair sample."""

    median: float
    sigma: float
    least: int
    most: int
    texts: int

    def lengths(self, texts: int, limit: int) -> list[int]:
        """That many lengths, none above `limit` tokens."""
        drawn = np.random.default_rng(SEED).lognormal(math.log(self.median), self.sigma, texts)
        return [int(n) for n in drawn.round().clip(self.least, self.most).clip(max=limit)]


WORKLOADS = {
    "Q": Workload(9, 0.5, 3, 32, 4096),
    "P": Workload(80, 0.7, 8, 512, 512),
    "L": Workload(512, 0.0, 512, 512, 64),
}


def write_texts(folder: Path, lengths: Sequence[int]) -> list[str]:
    """A text of each length, for the tokenizer of `folder`."""
    words = np.array(_whole_words(read_tokenizer(folder)))
    generator = np.random.default_rng(SEED)
    return [" ".join(generator.choice(words, max(1, length - 2))) for length in lengths]


def read_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer, without the padding and truncation that its file may ask for."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def read_limit(folder: Path) -> int:
    """Tokens of the longest text that the model takes."""
    limits = folder / "sentence_bert_config.json"
    given = json.loads(limits.read_text()).get("max_seq_length") if limits.is_file() else None
    return int(given or json.loads((folder / "config.json").read_text())["max_position_embeddings"])


def _whole_words(tokenizer: Tokenizer) -> list[str]:
    words = sorted(word for word in tokenizer.get_vocab() if word.isascii() and word.isalnum())
    encodings = tokenizer.encode_batch(words, add_special_tokens=False)
    return [word for word, encoding in zip(words, encodings, strict=True) if encoding.tokens == [word]]


def find_model(name: str) -> Path:
    """`minilm`, `bert-base`, or a directory. Raises SystemExit."""
    makers = {"minilm": _write_minilm, "bert-base": _write_bert_base}
    if name not in makers:
        if not (Path(name) / "config.json").is_file():
            raise SystemExit(f"{name!r} is neither minilm, bert-base nor a model's directory")
        return Path(name)
    folder = MODELS / f"{name}-benchmark"
    if not folder.is_dir():
        if not MINILM.is_dir():
            raise SystemExit("all-MiniLM-L6-v2 is missing: python scripts/fetch_demo_model.py minilm")
        partial = folder.with_suffix(".partial")
        shutil.rmtree(partial, ignore_errors=True)
        shutil.copytree(MINILM, partial)
        (partial / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": LIMIT}))
        makers[name](partial)
        partial.rename(folder)
    return folder


def _write_minilm(folder: Path) -> None:
    """As it is, but for the limit."""


def _write_bert_base(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text()) | BERT_BASE
    (folder / "config.json").write_text(json.dumps(config))
    pooling = folder / "1_Pooling" / "config.json"
    pooling.write_text(json.dumps(json.loads(pooling.read_text()) | {"word_embedding_dimension": 768}))
    save_file(_random_bert(config), folder / "model.safetensors", metadata={"format": "pt"})


def _random_bert(config: dict[str, int]) -> dict[str, Floats]:
    hidden, intermediate = config["hidden_size"], config["intermediate_size"]
    generator = np.random.default_rng(SEED)
    tensors = {}
    for name, rows in (
        ("word", config["vocab_size"]),
        ("position", config["max_position_embeddings"]),
        ("token_type", config["type_vocab_size"]),
    ):
        tensors[f"embeddings.{name}_embeddings.weight"] = _normal(rows, hidden, generator)
    tensors |= _norm("embeddings", hidden)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"encoder.layer.{layer}"
        for name in ("attention.self.query", "attention.self.key", "attention.self.value", "attention.output.dense"):
            tensors |= _linear(f"{prefix}.{name}", _normal(hidden, hidden, generator))
        tensors |= _linear(f"{prefix}.intermediate.dense", _normal(intermediate, hidden, generator))
        tensors |= _linear(f"{prefix}.output.dense", _normal(hidden, intermediate, generator))
        tensors |= _norm(f"{prefix}.attention.output", hidden) | _norm(f"{prefix}.output", hidden)
    return tensors | _linear("pooler.dense", _normal(hidden, hidden, generator))


def _normal(rows: int, columns: int, generator: np.random.Generator) -> Floats:
    return generator.standard_normal((rows, columns), np.float32) * np.float32(0.02)  # BERT's own initializer_range


def _linear(name: str, weight: Floats) -> dict[str, Floats]:
    return {f"{name}.weight": weight, f"{name}.bias": np.zeros(len(weight), np.float32)}


def _norm(name: str, size: int) -> dict[str, Floats]:
    return {f"{name}.LayerNorm.weight": np.ones(size, np.float32), f"{name}.LayerNorm.bias": np.zeros(size, np.float32)}
