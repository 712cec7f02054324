"""Owns rotary position embedding in the NeoX layout (halves of a head, not neighbours), on packed states.

A family reads its `Rope` once, asks it for a batch's `Rotation` once per batch, and rotates in every layer:

    rope = read_rope(config, head_dim)                       # when the model is built
    rotation = rope.rotation(inputs, dtype)                  # once per batch
    query_key = rotate(states[:, : 2 * heads], rotation)     # in each layer

`rotary_attention` does the last step and all that follows, for encoders that store query, key and value as one.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tei_grpc.errors import StartupError
from tei_grpc.layers.attention import FULL, Mask, attention
from tei_grpc.layers.packed import PackedInputs


@dataclass(frozen=True, slots=True)
class Rotation:
    """The rotation of every token of a batch."""

    cos: Tensor  # [tokens, 1, head_dim / 2]
    sin: Tensor  # [tokens, 1, head_dim / 2]


def rotate(states: Tensor, rotation: Rotation) -> Tensor:
    """Rotate each head's pairs (x_i, x_{i + head_dim / 2}) by the token's angles.

    [tokens, heads, head_dim] -> the same, in new memory. Query and key may come as one tensor, heads side by side.
    RoFormer, https://arxiv.org/abs/2104.09864, equation 34.
    """
    x, y = states.chunk(2, dim=-1)
    rotated = torch.empty(states.shape, dtype=states.dtype, device=states.device)
    first, second = rotated.chunk(2, dim=-1)
    torch.mul(x, rotation.cos, out=first).addcmul_(y, rotation.sin, value=-1)
    torch.mul(y, rotation.cos, out=second).addcmul_(x, rotation.sin)
    return rotated


def rotary_attention(
    states: Tensor, heads: int, inputs: PackedInputs, rotation: Rotation, *, mask: Mask = FULL
) -> Tensor:
    """Self-attention from one projection: queries of all heads, then keys, then values.

    [tokens, 3 * hidden] -> [tokens, hidden].
    """
    states = states.view(len(states), 3 * heads, -1)
    query, key = rotate(states[:, : 2 * heads], rotation).chunk(2, dim=1)
    return attention(query, (key, states[:, 2 * heads :]), inputs, scale=states.shape[2] ** -0.5, mask=mask)


@dataclass(frozen=True, slots=True)
class DynamicScaling:
    """NTK scaling that depends on a text's own length: theta grows once the text exceeds `trained_length` tokens."""

    theta: float
    head_dim: int
    factor: float
    trained_length: int

    def inv_freq(self, inputs: PackedInputs) -> Tensor:
        """Of every token, float32 [tokens, head_dim / 2]. The formula is that of transformers' `dynamic`."""
        lengths = inputs.cu_seqlens.diff().float().clamp(min=self.trained_length)
        growth = self.factor * lengths / self.trained_length - (self.factor - 1)
        thetas = self.theta * growth ** (self.head_dim / (self.head_dim - 2))
        exponents = _exponents(self.head_dim, lengths.device)
        return (1.0 / thetas[:, None] ** exponents)[inputs.text_ids]


@dataclass(frozen=True, slots=True)
class Rope:
    """How positions become angles."""

    inv_freq: Tensor  # [head_dim / 2] float32, on the CPU
    magnitude: float = 1.0  # factor on cos and sin
    dynamic: DynamicScaling | None = None  # takes the place of `inv_freq`
    _placed: dict[torch.device, Tensor] = field(default_factory=dict, repr=False, compare=False)

    def on(self, device: torch.device) -> Tensor:
        """`inv_freq` on a device, where it stays."""
        if device not in self._placed:
            self._placed[device] = self.inv_freq.to(device)
        return self._placed[device]

    def rotation(self, inputs: PackedInputs, dtype: torch.dtype) -> Rotation:
        """Of a batch. Angles are float32; cos and sin are cast to `dtype`."""
        positions = inputs.position_ids
        inv_freq = self.on(positions.device) if self.dynamic is None else self.dynamic.inv_freq(inputs)
        angles = (positions[:, None].float() * inv_freq)[:, None]
        return Rotation((angles.cos() * self.magnitude).to(dtype), (angles.sin() * self.magnitude).to(dtype))


@dataclass(frozen=True, slots=True)
class _Parameters:
    """A config's rope parameters, of one layer type."""

    values: Mapping[str, Any]
    config: Mapping[str, Any]
    head_dim: int
    theta: float
    type: str

    def number(self, name: str) -> float:
        """A parameter that this type of rope cannot do without."""
        value = self.values.get(name)
        if not isinstance(value, int | float):
            raise StartupError(f"`{name}` of rope type `{self.type}` must be a number, config.json has {value!r}")
        return value

    @property
    def trained_length(self) -> int:
        """Tokens in the longest text of the first training."""
        for holder in (self.config, self.values):
            if holder.get("original_max_position_embeddings"):
                return int(holder["original_max_position_embeddings"])
        return int(self.config["max_position_embeddings"])


def read_rope(
    config: Mapping[str, Any], head_dim: int, *, layer_type: str | None = None, theta: float = 10000.0
) -> Rope:
    """The rope of a config: `rope_parameters`, or `rope_theta` with `rope_scaling`; `theta` where neither says it.

    `layer_type` picks from `rope_parameters` that differ by type of layer, "full_attention".
    Raises StartupError for a type or a parameter that is not supported.
    """
    values = config.get("rope_parameters") or config.get("rope_scaling") or {}
    values = values.get(layer_type) or values
    kind = values.get("rope_type") or values.get("type") or "default"
    if kind not in _READERS:
        raise StartupError(f"rope type `{kind}` is not supported; supported are: {', '.join(_READERS)}")
    for holder in (config, values):
        if holder.get("partial_rotary_factor") not in (None, 1):
            raise StartupError(f"`partial_rotary_factor` {holder['partial_rotary_factor']} is not supported, only 1")
    base = values.get("rope_theta") or config.get("rope_theta") or theta
    return _READERS[kind](_Parameters(values, config, head_dim, base, kind))


def _exponents(head_dim: int, device: torch.device | str = "cpu") -> Tensor:
    return torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim


def _inv_freq(theta: float, head_dim: int) -> Tensor:
    return torch.tensor(1.0, device="cpu") / theta ** _exponents(head_dim)


def _read_default(parameters: _Parameters) -> Rope:
    return Rope(_inv_freq(parameters.theta, parameters.head_dim))


def _read_linear(parameters: _Parameters) -> Rope:
    return Rope(_inv_freq(parameters.theta, parameters.head_dim) / parameters.number("factor"))


def _read_ntk(parameters: _Parameters) -> Rope:
    """GTE's own, always on: (theta k)^(-2i/D) / k^(2/D)."""
    if parameters.values.get("mixed_b") is not None:
        raise StartupError(f"`mixed_b` {parameters.values['mixed_b']} of rope type `ntk` is not supported")
    factor, head_dim = parameters.number("factor"), parameters.head_dim
    return Rope(_inv_freq(parameters.theta * factor, head_dim) / factor ** (2 / head_dim))


def _read_dynamic(parameters: _Parameters) -> Rope:
    theta, head_dim = parameters.theta, parameters.head_dim
    trained_length = int(parameters.config["max_position_embeddings"])
    dynamic = DynamicScaling(theta, head_dim, parameters.number("factor"), trained_length)
    return Rope(_inv_freq(theta, head_dim), dynamic=dynamic)


def _read_llama3(parameters: _Parameters) -> Rope:
    """Long wavelengths are stretched by `factor`, short ones kept, those between blended.

    As in transformers: the blend is linear in the number of turns that a pair makes over the trained length.
    """
    inv_freq = _inv_freq(parameters.theta, parameters.head_dim)
    low, high = parameters.number("low_freq_factor"), parameters.number("high_freq_factor")
    turns = parameters.trained_length * inv_freq / (2 * math.pi)
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return Rope((1 - kept) * inv_freq / parameters.number("factor") + kept * inv_freq)


def _read_yarn(parameters: _Parameters) -> Rope:
    """YaRN, https://arxiv.org/abs/2309.00071: pairs that turn often are kept, slow ones stretched by `factor`."""
    values, factor = parameters.values, parameters.number("factor")
    fast, slow = (_turning_pair(parameters, values.get(name) or turns) for name, turns in _YARN_TURNS.items())
    if values.get("truncate", True):
        fast, slow = math.floor(fast), math.ceil(slow)
    fast, slow = max(fast, 0), min(slow, parameters.head_dim - 1)
    pairs = torch.arange(parameters.head_dim // 2, dtype=torch.float32, device="cpu")
    stretched = ((pairs - fast) / max(slow - fast, 0.001)).clamp(0, 1)
    inv_freq = _inv_freq(parameters.theta, parameters.head_dim)
    return Rope(inv_freq / factor * stretched + inv_freq * (1 - stretched), _yarn_magnitude(values, factor))


_YARN_TURNS = {"beta_fast": 32.0, "beta_slow": 1.0}


def _turning_pair(parameters: _Parameters, turns: float) -> float:
    """Which pair makes so many turns over the trained length."""
    wavelength = parameters.trained_length / (turns * 2 * math.pi)
    return parameters.head_dim * math.log(wavelength) / (2 * math.log(parameters.theta))


def _yarn_magnitude(values: Mapping[str, Any], factor: float) -> float:
    if values.get("attention_factor") is not None:
        return float(values["attention_factor"])
    growth = 0.1 * math.log(max(factor, 1.0))
    if values.get("mscale") and values.get("mscale_all_dim"):
        return float((growth * values["mscale"] + 1) / (growth * values["mscale_all_dim"] + 1))
    return growth + 1


_READERS: Mapping[str, Callable[[_Parameters], Rope]] = {
    "default": _read_default,
    "linear": _read_linear,
    "ntk": _read_ntk,
    "dynamic": _read_dynamic,
    "llama3": _read_llama3,
    "yarn": _read_yarn,
}
