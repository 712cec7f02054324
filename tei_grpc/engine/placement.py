"""Owns where a model runs, and in which numbers when nobody has said."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch

from tei_grpc.config import EngineConfig
from tei_grpc.errors import StartupError
from tei_grpc.layers import int8

HALF = ("bfloat16", "float16")


class Placement(NamedTuple):
    """Where a model runs, and in which numbers."""

    device: torch.device
    dtype: str  # as `--dtype` names it


def place_model(config: EngineConfig, hf_config: Mapping[str, Any]) -> Placement:
    """What the options say, or what suits the machine. Raises StartupError."""
    device = choose_device(config.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)  # of this thread
    return Placement(device, choose_dtype(config.dtype, device, hf_config))


def choose_device(wanted: str) -> torch.device:
    """The device of `--device`; `auto` is the first of CUDA, MPS and CPU. Raises StartupError where it is absent."""
    present = list(_present())
    if wanted == "auto":
        return torch.device(present[0])
    name = "cuda:0" if wanted == "cuda" else wanted
    if name not in present:
        raise StartupError(f"`--device` (DEVICE): there is no `{wanted}` here; there is: {', '.join(present)}")
    return torch.device(name)


def _present() -> Iterator[str]:
    if torch.cuda.is_available():
        yield from (f"cuda:{index}" for index in range(torch.cuda.device_count()))
    if torch.backends.mps.is_available():
        yield "mps"
    yield "cpu"


def choose_dtype(wanted: str | None, device: torch.device, hf_config: Mapping[str, Any]) -> str:
    """`--dtype`, or what suits the device: on CUDA the checkpoint's own 16-bit type, or float16; elsewhere float32.

    Raises StartupError where the device has no fast product in that type.
    """
    if wanted is None:
        return "float32" if device.type != "cuda" else _half(hf_config)
    if wanted == "int8":
        if device.type != "cpu":
            raise StartupError(f"`dtype` int8 is for CPUs, the model runs on {device}; use float16 or bfloat16")
        int8.require()
    return wanted


def _half(hf_config: Mapping[str, Any]) -> str:
    stored = str(hf_config.get("dtype") or hf_config.get("torch_dtype")).removeprefix("torch.")
    return stored if stored in HALF else "float16"


def activations(dtype: str) -> torch.dtype:
    """The type of activations, and of what is stored as it comes."""
    found: torch.dtype = getattr(torch, "bfloat16" if dtype == "int8" else dtype)
    return found
