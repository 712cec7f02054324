"""Owns activation functions, by the names that configs give them."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from tei_grpc.errors import StartupError

Activation = Callable[[Tensor], Tensor]

_gelu_tanh = partial(functional.gelu, approximate="tanh")

ACTIVATIONS: dict[str, Activation] = {
    "gelu": functional.gelu,
    "gelu_python": functional.gelu,
    "gelu_new": _gelu_tanh,
    "gelu_fast": _gelu_tanh,
    "gelu_pytorch_tanh": _gelu_tanh,
    "relu": functional.relu,
    "silu": functional.silu,
    "swish": functional.silu,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "identity": lambda x: x,
    "linear": lambda x: x,
}


def activation(name: str) -> Activation:
    """The function a config calls `name`. Raises StartupError for a name that is not known."""
    found = ACTIVATIONS.get(name.lower())
    if found is None:
        raise StartupError(f"activation `{name}` is not supported; supported are: {', '.join(ACTIVATIONS)}")
    return found
