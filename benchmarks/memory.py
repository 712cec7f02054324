"""Memory of models on a CPU, against their weights and the workspace formula of the docs.

    python benchmarks/memory.py [--tokens 4096] [--shapes minilm bert splade qwen3] [--dtypes float32 bfloat16 int8]

Random weights in the shape of all-MiniLM-L6-v2, BERT-base, BERT-base with SPLADE's head, and Qwen3-0.6B (1.2 GB) are
written to a temporary folder. For each dtype a fresh process loads them and runs batches of that many tokens: the
longest texts, texts of 64 to 512 tokens, and texts of 16. `loaded` is memory over that of the libraries, without pages
of the weight files, which the system may drop at any time; `W` is the formula, `peak` what the batches took above
`loaded`, and `kept` what of that stayed.
"""

import argparse
import json
import logging
import multiprocessing
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tei_grpc import cpus

cpus.tune_process()  # as a server does, before torch is there

import torch  # noqa: E402
from safetensors.torch import save_file  # noqa: E402

BERT = {"architectures": ["BertModel"], "model_type": "bert", "max_position_embeddings": 512, "vocab_size": 30522}
BASE = BERT | {"hidden_size": 768, "num_attention_heads": 12, "intermediate_size": 3072, "num_hidden_layers": 12}
QWEN3 = {
    "architectures": ["Qwen3Model"],
    "model_type": "qwen3",
    "hidden_size": 1024,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 3072,
    "vocab_size": 151936,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "hidden_act": "silu",
}
SHAPES: dict[str, dict[str, Any]] = {
    "minilm": BERT | {"hidden_size": 384, "num_attention_heads": 12, "intermediate_size": 1536, "num_hidden_layers": 6},
    "bert": BASE,
    "splade": BASE | {"architectures": ["BertForMaskedLM"]},
    "qwen3": QWEN3,
}
POOLING = {"minilm": "mean", "bert": "mean", "splade": "splade", "qwen3": "last-token"}
MIB = 1 << 20


def write_encoder(folder: Path, config: dict[str, Any]) -> None:
    """Random weights as transformers makes them."""
    import transformers

    model = getattr(transformers, config["architectures"][0])(transformers.BertConfig(**config))
    model.save_pretrained(folder)


def write_decoder(folder: Path, config: dict[str, Any]) -> None:
    """Random weights, a layer at a time, in bfloat16."""
    generator = torch.Generator().manual_seed(0)
    hidden, intermediate, size = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    query, key = config["num_attention_heads"] * size, config["num_key_value_heads"] * size
    shapes = {
        "self_attn.q_proj": (query, hidden),
        "self_attn.k_proj": (key, hidden),
        "self_attn.v_proj": (key, hidden),
        "self_attn.o_proj": (hidden, query),
        "mlp.gate_proj": (intermediate, hidden),
        "mlp.up_proj": (intermediate, hidden),
        "mlp.down_proj": (hidden, intermediate),
    }
    norms = {"input_layernorm": hidden, "post_attention_layernorm": hidden}
    norms |= {"self_attn.q_norm": size, "self_attn.k_norm": size}
    tensors = {"embed_tokens.weight": _random((config["vocab_size"], hidden), generator)}
    for layer in range(config["num_hidden_layers"]):
        tensors |= {f"layers.{layer}.{name}.weight": _random(shape, generator) for name, shape in shapes.items()}
        tensors |= {f"layers.{layer}.{name}.weight": torch.ones(n, dtype=torch.bfloat16) for name, n in norms.items()}
    tensors["norm.weight"] = torch.ones(hidden, dtype=torch.bfloat16)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))


def measure(folder: Path, shape: str, dtype: str, tokens: int) -> None:
    """Load and run in this process, which should be a fresh one, and print a row."""
    from tei_grpc.config import EngineConfig
    from tei_grpc.engine.runner import Runner
    from tei_grpc.engine.workspace import Watch
    from tei_grpc.loading.model_config import read_model_config

    logging.basicConfig(level=logging.ERROR)
    idle = Watch()
    options = EngineConfig(model_id=str(folder), pooling=POOLING[shape], dtype=dtype, max_batch_tokens=tokens)
    model = read_model_config(folder, options)
    runner = Runner(model, options)
    runner.warm_up()
    loaded = Watch()
    for lengths in _batches(tokens, model.max_input_length):
        _run(runner, lengths)
    kept, weights = Watch(), sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    before, after, idle_bytes = loaded.before or 0, kept.before or 0, idle.before or 0
    columns = weights, before - idle_bytes, runner.workspace.bytes(tokens), loaded.peak, after - before
    print(f"{shape:8}{dtype:10}", *(f"{value / MIB:8.0f}" for value in columns), flush=True)


def _run(runner: Any, lengths: list[int]) -> None:
    import numpy as np

    from tei_grpc.engine.batch import pack
    from tei_grpc.types import Entry

    texts = [np.arange(length, dtype=np.int32) for length in lengths]
    runner.run(pack([Entry(row, runner.kind, text) for row, text in enumerate(texts)]))


def _batches(tokens: int, longest: int) -> list[list[int]]:
    mixed = [min(longest, 64 * (1 + place % 8)) for place in range(tokens)]
    while sum(mixed) > tokens:
        mixed.pop()
    longest = min(longest, tokens)
    return [[longest] * (tokens // longest), sorted(mixed), [16] * (tokens // 16)]


def _random(shape: tuple[int, int], generator: torch.Generator) -> torch.Tensor:
    return torch.randn(shape, generator=generator).mul_(shape[1] ** -0.5).to(torch.bfloat16)


def _in_fresh_process(work: Any, *arguments: Any) -> None:
    process = multiprocessing.get_context("spawn").Process(target=work, args=arguments)
    process.start()
    process.join()
    if process.exitcode:
        raise SystemExit(process.exitcode)


def main() -> None:
    """Write, then measure, each in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=SHAPES)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16", "int8"])
    arguments = parser.parse_args()
    print(f"{'MiB':18}", *(f"{name:>8}" for name in ("on disk", "loaded", "W", "peak", "kept")))
    for shape in arguments.shapes:
        with tempfile.TemporaryDirectory() as temporary:
            folder, config = Path(temporary), SHAPES[shape]
            _in_fresh_process(write_decoder if shape == "qwen3" else write_encoder, folder, config)
            for dtype in arguments.dtypes:
                _in_fresh_process(measure, folder, shape, dtype, arguments.tokens)


if __name__ == "__main__":
    main()
