"""Memory of a bf16 decoder in the shape of Qwen3-0.6B, against its weights and the workspace formula of the docs.

    python benchmarks/memory.py [--tokens 4096] [--folder DIR]

Random weights are written to DIR (1.2 GB; a temporary folder by default). A fresh process loads them and runs batches
of that many tokens: one text, texts of 64 to 512 tokens, and texts of 16. It reports memory over that of the libraries,
without pages of the weight files, which the system may drop at any time.

glibc keeps holes between freed tensors. MALLOC_MMAP_THRESHOLD_=1048576 in the environment shows what is in use.
"""

import argparse
import json
import logging
import multiprocessing
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

CONFIG = {
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
BYTES = 2  # of a bf16 number
FIXED = 64 << 20  # blocks of scores and their masks, tables of angles, what kernels keep for themselves
MIB = 1 << 20


def workspace_bytes(config: Mapping[str, Any], tokens: int) -> int:
    """Most that a batch of this many tokens takes besides the weights; docs/operations.md derives it."""
    hidden, intermediate = config["hidden_size"], config["intermediate_size"]
    query = config["num_attention_heads"] * config["head_dim"]
    key = config["num_key_value_heads"] * config["head_dim"]
    return BYTES * tokens * max(3 * hidden + 4 * query + 5 * key, 5 * hidden + 3 * intermediate) + FIXED


def write_checkpoint(folder: Path) -> None:
    """Random weights, a layer at a time, and a pooling config."""
    config, generator = CONFIG, torch.Generator().manual_seed(0)
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


def measure(folder: Path, tokens: int) -> None:
    """Load and run in this process, which should be a fresh one, and print a line per step."""
    from tei_grpc.config import EngineConfig
    from tei_grpc.engine.runner import Runner
    from tei_grpc.loading.model_config import read_model_config

    logging.basicConfig(level=logging.WARNING)
    weights = (folder / "model.safetensors").stat().st_size
    start = _memory("RssAnon")
    _forget_peak()
    options = EngineConfig(model_id=str(folder), pooling="last-token", dtype="bfloat16")
    runner = Runner(read_model_config(folder, options), options)
    runner.warm_up()
    loaded = _memory("RssAnon") - start
    print(f"weights on disk          {weights / MIB:8.0f} MiB")
    print(f"libraries alone          {start / MIB:8.0f} MiB")
    print(f"loaded and warm          {loaded / MIB:8.0f} MiB, {loaded / weights:.3f} of the weights")
    before = _memory("VmRSS")
    for name, lengths in _batches(tokens).items():
        _run(runner, lengths)
        print(f"batch of {name:15s} {(_memory('VmHWM') - before) / MIB:8.0f} MiB more at its peak", flush=True)
    print(f"formula, {tokens:5d} tokens    {workspace_bytes(CONFIG, tokens) / MIB:8.0f} MiB")
    print(f"kept afterwards          {(_memory('VmRSS') - before) / MIB:8.0f} MiB")


def _run(runner: Any, lengths: list[int]) -> None:
    import numpy as np

    from tei_grpc.engine.batch import pack
    from tei_grpc.types import Entry, Kind

    texts = [np.arange(length, dtype=np.int32) for length in lengths]
    _forget_peak()
    runner.run(pack([Entry(row, Kind.EMBED, text) for row, text in enumerate(texts)]))


def _batches(tokens: int) -> dict[str, list[int]]:
    mixed = [64 * (1 + place % 8) for place in range(tokens)]
    while sum(mixed) > tokens:
        mixed.pop()
    return {"one text": [tokens], "mixed lengths": sorted(mixed), "short texts": [16] * (tokens // 16)}


def _random(shape: tuple[int, int], generator: torch.Generator) -> torch.Tensor:
    return torch.randn(shape, generator=generator).mul_(shape[1] ** -0.5).to(torch.bfloat16)


def _memory(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"this system does not report {name}")


def _forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def main() -> None:
    """Write, then measure, each in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--folder", type=Path)
    arguments = parser.parse_args()
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        steps: list[tuple[Any, ...]] = [(measure, folder, arguments.tokens)]
        if not (folder / "model.safetensors").exists():
            steps.insert(0, (write_checkpoint, folder))
        for work, *parameters in steps:
            process = spawn.Process(target=work, args=parameters)
            process.start()
            process.join()
            if process.exitcode:
                raise SystemExit(process.exitcode)


if __name__ == "__main__":
    main()
