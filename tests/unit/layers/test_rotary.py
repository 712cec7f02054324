"""Rotary positions: the rotation, and what configs say about its angles."""

import math

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from tei_grpc.errors import StartupError
from tei_grpc.layers.attention import Mask, attention
from tei_grpc.layers.rotary import Rope, read_rope, rotary_attention, rotate
from tests.unit.layers.batches import packed_inputs

HEAD_DIM = 64
LENGTHS = {"max_position_embeddings": 8192}
LINEAR = {"rope_type": "linear", "factor": 3.0}
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 2048,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}
YARN_MSCALE = {**YARN, "mscale": 1.0, "mscale_all_dim": 0.7, "beta_fast": 20.0, "truncate": False}
YARN_FACTOR = {**YARN, "attention_factor": 1.5}
ROPES = [{"rope_type": "default"}, LINEAR, LLAMA3, YARN, YARN_MSCALE, YARN_FACTOR]


def transformers_rope(parameters: dict[str, object], length: int | None = None) -> tuple[torch.Tensor, float]:
    heads = 2
    config = LlamaConfig(
        hidden_size=heads * HEAD_DIM,
        num_attention_heads=heads,
        rope_parameters={**parameters, "rope_theta": 50000.0},
        **LENGTHS,
    )
    if parameters["rope_type"] == "default":
        return 1 / 50000.0 ** (torch.arange(0, HEAD_DIM, 2) / HEAD_DIM), 1.0
    return ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, torch.device("cpu"), seq_len=length)


def test_pair_is_turned_by_position_times_frequency() -> None:
    rope = Rope(torch.tensor([1.0, 0.1]))
    states = torch.tensor([1.0, 2.0, 3.0, 4.0]).expand(3, 1, 4)
    turned = rotate(states, rope.rotation(packed_inputs(3), torch.float32))
    for position in range(3):
        for pair, frequency in enumerate([1.0, 0.1]):
            expected = complex(1 + pair, 3 + pair) * complex(
                math.cos(position * frequency), math.sin(position * frequency)
            )
            assert turned[position, 0, pair].item() == pytest.approx(expected.real, abs=1e-6)
            assert turned[position, 0, pair + 2].item() == pytest.approx(expected.imag, abs=1e-6)


def test_positions_restart_with_each_text() -> None:
    rope = read_rope({"rope_theta": 100.0}, 8)
    together, alone = (rope.rotation(packed_inputs(*lengths), torch.float32) for lengths in [(5, 3), (3,)])
    assert torch.equal(together.cos[5:], alone.cos)
    assert torch.equal(together.sin[5:], alone.sin)


def test_angles_are_float32_whatever_the_states_are() -> None:
    rope, inputs = read_rope({"rope_theta": 100.0}, 8), packed_inputs(1000)
    half, full = (rope.rotation(inputs, dtype) for dtype in (torch.bfloat16, torch.float32))
    assert torch.equal(half.cos, full.cos.bfloat16())


def test_attention_over_one_projection_is_attention_over_rotated_parts() -> None:
    inputs, mask = packed_inputs(3, 9), Mask(left=2, right=2)
    rotation = read_rope({"rope_theta": 100.0}, 4).rotation(inputs, torch.float32)
    query, key, value = torch.randn(3, 12, 2, 4, generator=torch.Generator().manual_seed(0))
    states = torch.stack([query, key, value], 1).flatten(1)
    expected = attention(rotate(query, rotation), (rotate(key, rotation), value), inputs, scale=0.5, mask=mask)
    torch.testing.assert_close(rotary_attention(states, 2, inputs, rotation, mask=mask), expected)


@pytest.mark.parametrize("parameters", ROPES)
def test_rope_parameters_give_the_frequencies_of_transformers(parameters: dict[str, object]) -> None:
    inv_freq, magnitude = transformers_rope(parameters)
    rope = read_rope({**LENGTHS, "rope_parameters": {**parameters, "rope_theta": 50000.0}}, HEAD_DIM)
    torch.testing.assert_close(rope.inv_freq, inv_freq, rtol=1e-6, atol=0)
    assert rope.magnitude == pytest.approx(magnitude)


@pytest.mark.parametrize("parameters", ROPES)
def test_older_keys_give_the_same_frequencies(parameters: dict[str, object]) -> None:
    scaling = {key: value for key, value in parameters.items() if key != "rope_type"}
    scaling["type"] = parameters["rope_type"]
    rope = read_rope({**LENGTHS, "rope_theta": 50000.0, "rope_scaling": scaling}, HEAD_DIM)
    expected = read_rope({**LENGTHS, "rope_parameters": {**parameters, "rope_theta": 50000.0}}, HEAD_DIM)
    assert torch.equal(rope.inv_freq, expected.inv_freq)
    assert rope.magnitude == expected.magnitude


def test_magnitude_scales_cos_and_sin() -> None:
    inputs = packed_inputs(4)
    plain, scaled = (Rope(torch.tensor([1.0]), magnitude).rotation(inputs, torch.float32) for magnitude in (1.0, 1.5))
    torch.testing.assert_close(scaled.cos, plain.cos * 1.5)
    torch.testing.assert_close(scaled.sin, plain.sin * 1.5)


def test_ntk_rope_is_the_formula_of_gte() -> None:
    scaling = {"rope_theta": 20000, "rope_scaling": {"type": "ntk", "factor": 8.0}}
    expected = [(20000 * 8) ** (-2 * i / HEAD_DIM) / 8 ** (2 / HEAD_DIM) for i in range(HEAD_DIM // 2)]
    torch.testing.assert_close(read_rope(scaling, HEAD_DIM).inv_freq, torch.tensor(expected), rtol=1e-6, atol=0)


def test_dynamic_rope_depends_on_each_texts_own_length() -> None:
    rope = read_rope({"max_position_embeddings": 8, "rope_parameters": {**DYNAMIC, "rope_theta": 50000.0}}, HEAD_DIM)
    inputs = packed_inputs(5, 20, 8)
    inv_freq = rope.dynamic.inv_freq(inputs)
    plain, _ = transformers_rope({"rope_type": "default"})
    theta = 50000.0 * (2.0 * 20 / 8 - 1) ** (HEAD_DIM / (HEAD_DIM - 2))
    grown = theta ** -(torch.arange(0, HEAD_DIM, 2, dtype=torch.float64) / HEAD_DIM)
    for start, stop, expected in [(0, 5, plain), (5, 25, grown.float()), (25, 33, plain)]:
        torch.testing.assert_close(inv_freq[start:stop], expected.expand(stop - start, -1), rtol=1e-5, atol=0)


def test_each_layer_type_has_its_own_theta() -> None:
    parameters = {"full_attention": {"rope_theta": 100.0}, "sliding_attention": {"rope_theta": 10.0}}
    for layer_type, theta in [("full_attention", 100.0), ("sliding_attention", 10.0)]:
        rope = read_rope({"rope_parameters": parameters}, 4, layer_type=layer_type)
        torch.testing.assert_close(rope.inv_freq, torch.tensor([1.0, theta**-0.5]))


def test_theta_of_the_family_is_taken_where_the_config_names_none() -> None:
    torch.testing.assert_close(read_rope({}, 4, theta=400.0).inv_freq, torch.tensor([1.0, 0.05]))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"rope_scaling": {"type": "longrope"}}, "rope type `longrope` is not supported; supported are: default"),
        ({"rope_parameters": {"rope_type": "linear"}}, "`factor` of rope type `linear` must be a number"),
        ({"rope_scaling": {"type": "ntk", "factor": 2.0, "mixed_b": 0.5}}, "`mixed_b` 0.5"),
        ({"partial_rotary_factor": 0.5}, "`partial_rotary_factor` 0.5 is not supported"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "`partial_rotary_factor` 0.5 is not supported"),
    ],
)
def test_rope_that_is_not_supported_is_refused(config: dict[str, object], message: str) -> None:
    with pytest.raises(StartupError, match=message):
        read_rope(config, 8)
