"""Kernels of flash attention for texts that lie packed: what they are handed."""

import inspect

import pytest
import torch
from torch import Tensor

from tei_grpc.layers import varlen
from tei_grpc.layers.attention import CAUSAL, FULL, Mask
from tei_grpc.layers.kernels import fastest, is_right, sample
from tei_grpc.layers.varlen import Varlen, of_flash_attn, of_torch, window
from tests import stand_ins
from tests.stand_ins import torchs

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        (FULL, (-1, -1)),
        (CAUSAL, (-1, 0)),
        (Mask(left=5, right=0), (5, 0)),
        (Mask(left=4, right=4), (4, 4)),
        (Mask(left=3), (3, -1)),
    ],
)
def test_window_is_spelled_as_flash_attention_reads_it(mask: Mask, expected: tuple[int, int]) -> None:
    assert window(mask) == expected


def test_stand_in_has_the_signature_of_torchs_kernel() -> None:
    from torch.nn.attention.varlen import varlen_attn

    assert list(inspect.signature(stand_ins.varlen_attn).parameters) == list(inspect.signature(varlen_attn).parameters)


def test_kernel_with_fewer_arguments_is_called_without_them() -> None:
    def older(q: Tensor, k: Tensor, v: Tensor, *bounds: object, scale: float, window_size: tuple[int, int]) -> Tensor:
        return stand_ins.varlen_attn(q, k, v, *bounds, scale=scale, window_size=window_size, enable_gqa=True)

    assert is_right(next(of_torch(older)), sample(CPU, torch.bfloat16))


def test_kernel_without_windows_is_not_used() -> None:
    assert list(of_torch(lambda query, key, value, is_causal=False: query)) == []


def test_kernel_that_refuses_to_keep_its_sums_in_one_piece_is_asked_again_without() -> None:
    def refuses(*states: Tensor, num_splits: int | None = None, **options: object) -> Tensor:
        if num_splits is not None:
            raise RuntimeError("num_splits is for FA3")
        return stand_ins.varlen_attn(*states, **options)

    refuses.__signature__ = inspect.signature(stand_ins.varlen_attn)
    first, second = of_torch(refuses)
    assert not is_right(first, sample(CPU, torch.bfloat16))
    assert is_right(second, sample(CPU, torch.bfloat16))


def test_flash_attn_is_handed_the_same() -> None:
    def flash_attn_varlen_func(  # as of flash-attn 2
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None,
        causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False,
        return_attn_probs=False, block_table=None,
    ):  # fmt: skip
        bounds = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
        return stand_ins.varlen_attn(q, k, v, *bounds, scale=softmax_scale, window_size=window_size, enable_gqa=True)

    call = sample(CPU, torch.bfloat16)
    kernel = of_flash_attn(flash_attn_varlen_func)
    for mask in (FULL, CAUSAL, Mask(left=20, right=0)):
        assert call._replace(mask=mask).to(kernel).equal(call._replace(mask=mask).to(torchs()))


def test_fastest_of_the_kernels_that_are_right_is_taken() -> None:
    wrong = Varlen("wrong", lambda query, *_: query * 0)
    slow, quick = (Varlen(name, torchs().run) for name in ("slow", "quick"))
    times = iter([2.0, 1.0])
    assert fastest([wrong, slow, quick], sample(CPU, torch.bfloat16), lambda run: next(times)) is quick


def test_first_way_to_call_a_kernel_is_kept_where_it_is_right() -> None:
    first, second = of_torch(stand_ins.varlen_attn)
    assert fastest([first, second], sample(CPU, torch.bfloat16), lambda run: 1 / 0) is first


def test_kernel_is_proven_where_16_bits_are_too_small_for_the_model() -> None:
    call = sample(CPU, torch.bfloat16)
    call.key_value[1][3] = torch.inf
    assert is_right(torchs(), call)
    assert not is_right(Varlen("wrong", lambda *call: torchs().run(*call) * 1.1), call)


@pytest.mark.parametrize("kernels", [[], [Varlen("absent", lambda *_: 1 / 0)]])
def test_there_may_be_no_flash_attention(kernels: list[Varlen]) -> None:
    assert fastest(kernels, sample(CPU, torch.bfloat16), lambda run: 0.0) is None


def test_torchs_kernel_is_refused_where_it_does_not_run() -> None:
    assert fastest(varlen.find_varlen(), sample(CPU, torch.bfloat16), lambda run: 0.0) is None
