"""How large a model may say that it is, before anything is made by its numbers."""

from collections.abc import Mapping
from typing import Any

from tei_grpc.errors import StartupError

MAX_LAYERS = 1000  # each is an object, before a tensor is found missing
LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
MAX_SIZE = 2**20  # of what tables are made at start, like the angles of a head
SIZES = (
    *("hidden_size", "intermediate_size", "head_dim", "num_attention_heads", "num_key_value_heads", "num_experts"),
    *("embedding_size", "dim", "hidden_dim", "n_heads", "n_head", "d_model", "d_ff", "d_kv", "n_embd", "n_inner"),
)


def check_sizes(hf_config: Mapping[str, Any]) -> None:
    """Raise StartupError for a config.json with more layers, or larger ones, than any model has."""
    for key in LAYERS:
        layers = hf_config.get(key)
        if isinstance(layers, int) and not 0 < layers <= MAX_LAYERS:
            raise StartupError(f"`{key}` in `config.json` must be 1 to {MAX_LAYERS}. Given: {layers}")
    for key in SIZES:
        size = hf_config.get(key)
        if isinstance(size, int | float) and abs(size) > MAX_SIZE:
            raise StartupError(f"`{key}` in `config.json` must be at most {MAX_SIZE}. Given: {size}")
