"""Owns the flash-attention kernels for packed texts: torch's own and flash-attn's, with one signature.

They differ between releases. What a release has is read off its signature, once, at load.
"""

import importlib
import inspect
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tei_grpc.layers.attention import Mask
from tei_grpc.layers.packed import PackedInputs

logger = logging.getLogger(__name__)

DTYPES = (torch.float16, torch.bfloat16)
HEAD_MULTIPLE, LARGEST_HEAD = 8, 256  # values of a head that the kernels take
CAPABILITY = (8, 0)  # Ampere, the oldest that they run on
UNLIMITED = -1


@dataclass(frozen=True, slots=True)
class Varlen:
    """Flash attention over packed texts, for masks without a bias."""

    name: str
    run: Callable[[Tensor, Tensor, Tensor, PackedInputs, float, tuple[int, int]], Tensor]

    def __call__(
        self, query: Tensor, key_value: tuple[Tensor, Tensor], inputs: PackedInputs, *, scale: float, mask: Mask
    ) -> Tensor:
        """See `attention.attention`."""
        return self.run(query, *key_value, inputs, scale, window(mask)).flatten(1)


def takes(query: Tensor, mask: Mask) -> bool:
    """Whether the kernels can be asked at all."""
    head_dim = query.shape[-1]
    fits = head_dim % HEAD_MULTIPLE == 0 and head_dim <= LARGEST_HEAD
    return mask.bias is None and query.dtype in DTYPES and fits


def window(mask: Mask) -> tuple[int, int]:
    """The mask as `window_size`: tokens to the left and to the right, -1 without limit; (-1, 0) is causal."""
    return UNLIMITED if mask.left is None else mask.left, UNLIMITED if mask.right is None else mask.right


def find_varlen() -> Iterator[Varlen]:
    """Every kernel that is installed, which does not say that it runs on the device at hand."""
    torchs = _import("torch.nn.attention.varlen", "varlen_attn")
    if torchs is not None:
        yield from of_torch(torchs)
    flash_attn = _import("flash_attn", "flash_attn_varlen_func")
    if flash_attn is not None:
        yield of_flash_attn(flash_attn)


def of_torch(function: Callable[..., Any]) -> Iterator[Varlen]:
    """`torch.nn.attention.varlen.varlen_attn`, in the ways that its signature allows, best first.

    `num_splits` of 1 keeps a text's sums in one order, whatever else is in the batch; `enable_gqa` allows fewer heads
    of keys than of queries, which releases without it allow anyway.
    """
    known = inspect.signature(function).parameters
    if not {"scale", "window_size"} <= set(known):
        logger.warning("torch's varlen_attn has no `window_size` or no `scale`; it is not used")
        return
    options = {name: value for name, value in {"enable_gqa": True, "num_splits": 1}.items() if name in known}
    for chosen in (options, {name: value for name, value in options.items() if name != "num_splits"}):
        yield Varlen("varlen_attn", _torch_call(function, chosen))


def _torch_call(function: Callable[..., Any], options: dict[str, Any]) -> Callable[..., Tensor]:
    def run(
        query: Tensor, key: Tensor, value: Tensor, inputs: PackedInputs, scale: float, window_size: tuple[int, int]
    ) -> Tensor:
        bounds, longest = inputs.cu_seqlens, inputs.max_seqlen
        attended: Tensor = function(
            query, key, value, bounds, bounds, longest, longest, scale=scale, window_size=window_size, **options
        )
        return attended

    return run


def of_flash_attn(function: Callable[..., Any]) -> Varlen:
    """`flash_attn_varlen_func` of the package flash-attn, in which a window of (-1, 0) is causal, too."""

    def run(
        query: Tensor, key: Tensor, value: Tensor, inputs: PackedInputs, scale: float, window_size: tuple[int, int]
    ) -> Tensor:
        bounds, longest = inputs.cu_seqlens, inputs.max_seqlen
        attended: Tensor = function(
            query, key, value, bounds, bounds, longest, longest, softmax_scale=scale, window_size=window_size
        )
        return attended

    return Varlen("flash-attn", run)


def _import(module: str, name: str) -> Callable[..., Any] | None:
    try:
        function: Callable[..., Any] = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, OSError) as error:  # OSError: a library built for another CUDA
        logger.debug("%s is not there: %s", module, error)
        return None
    return function
