"""Owns computing in float32 with a model whose weights are 16-bit."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._pytree import tree_map

NARROW = (torch.float16, torch.bfloat16)


class Float32(TorchFunctionMode):
    """Within this context every torch function sees its 16-bit operands widened to float32.

    Weights are widened operation by operation, so that no second copy of the model ever exists; of an embedding table
    only the rows that were looked up are.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call `func` with widened operands."""
        if func is torch.nn.functional.embedding:
            return widen(func(*args, **(kwargs or {})))
        return func(*tree_map(widen, tuple(args)), **tree_map(widen, dict(kwargs or {})))


def is_widening() -> bool:
    """Whether this code runs within a `Float32`: then even the dtype of a tensor is told as if it were widened."""
    modes = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    return any(isinstance(mode, Float32) for mode in modes)


def widen(value: Any) -> Any:
    """A 16-bit tensor as float32; everything else as it is."""
    return value.float() if isinstance(value, Tensor) and value.dtype in NARROW and not value.is_mkldnn else value
