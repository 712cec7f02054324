"""CPU stand-ins for kernels that only a CUDA device has: their exact signature, and a loop over texts."""

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from tei_grpc.layers.varlen import Varlen, of_torch


def varlen_attn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    *,
    return_aux: object | None = None,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
) -> Tensor:
    """As `torch.nn.attention.varlen.varlen_attn` of torch 2.13; what the kernel would refuse or read wrongly fails."""
    assert cu_seq_q.dtype == torch.int32
    assert cu_seq_k is cu_seq_q
    assert cu_seq_q[0] == 0
    assert cu_seq_q[-1] == len(query) == len(key) == len(value)
    assert max_q == max_k
    assert all(states.stride(-1) == 1 for states in (query, key, value))
    assert enable_gqa or query.shape[1] == key.shape[1]
    lengths = cu_seq_q.diff().tolist()
    assert max(lengths) <= max_q
    output = torch.full(query.shape, torch.nan, dtype=query.dtype)
    for start, length in zip(cu_seq_q.tolist(), lengths, strict=False):
        rows = slice(start, start + length)
        states = [x[rows].transpose(0, 1)[None] for x in (query, key, value)]
        attended = scaled_dot_product_attention(
            *states, attn_mask=_seen(length, *window_size), scale=scale, enable_gqa=True
        )
        output[rows] = attended[0].transpose(0, 1)
    return output


def _seen(length: int, left: int, right: int) -> Tensor:
    distance = torch.arange(length) - torch.arange(length)[:, None]
    return (distance >= -(left if left >= 0 else length)) & (distance <= (right if right >= 0 else length))


def torchs() -> Varlen:
    return next(of_torch(varlen_attn))
