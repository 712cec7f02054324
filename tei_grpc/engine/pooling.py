"""Owns how token vectors become one vector per text, over packed texts, for all families."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from tei_grpc.layers.packed import upload
from tei_grpc.layers.rows import sums
from tei_grpc.types import Pooling


@dataclass(frozen=True, slots=True)
class Span:
    """The rows of one text among the packed rows, and how many of the first belong to a prompt."""

    start: int
    stop: int
    prompt: int = 0

    @property
    def first(self) -> int:
        """First row that is pooled."""
        return min(self.start + self.prompt, self.stop)


def pool(hidden: Tensor, spans: Sequence[Span], pooling: Sequence[Pooling]) -> Tensor:
    """One vector per span, of the modes side by side: [tokens, hidden] -> float32 [spans, modes * hidden].

    Prompt tokens are left out as sentence-transformers does with `include_prompt: false`: the first token that is not
    the prompt's stands for cls; means do not count the prompt; weights still count positions from the text's start.
    A text that is all prompt gives zeros, or its first token for cls and its last one for last-token. Nothing is
    normalised.
    """
    return torch.cat([_POOLERS[mode](hidden, spans) for mode in pooling], dim=1)


def _cls(hidden: Tensor, spans: Sequence[Span]) -> Tensor:
    rows = [span.first if span.first < span.stop else span.start for span in spans]
    return hidden[upload(rows, hidden.device)].float()


def _last_token(hidden: Tensor, spans: Sequence[Span]) -> Tensor:
    return hidden[upload([span.stop - 1 for span in spans], hidden.device)].float()


def _mean(hidden: Tensor, spans: Sequence[Span]) -> Tensor:
    return _sums(hidden, spans) / _counts(hidden, spans)


def _mean_sqrt_len(hidden: Tensor, spans: Sequence[Span]) -> Tensor:
    return _sums(hidden, spans) / _counts(hidden, spans).sqrt()


def _weighted_mean(hidden: Tensor, spans: Sequence[Span]) -> Tensor:
    rows = []
    for span in spans:
        weights = torch.arange(span.first - span.start + 1, span.stop - span.start + 1, device=hidden.device).float()
        rows.append(weights @ hidden[span.first : span.stop].float() / weights.sum().clamp(min=1))
    return torch.stack(rows)


def _max(hidden: Tensor, spans: Sequence[Span]) -> Tensor:
    zeros = hidden.new_zeros(hidden.shape[1])
    rows = [hidden[span.first : span.stop].amax(0) if span.first < span.stop else zeros for span in spans]
    return torch.stack(rows).float()


def _sums(hidden: Tensor, spans: Sequence[Span]) -> Tensor:
    if hidden.is_cuda:
        return segment_sums(hidden, spans)
    return sums(hidden, [(span.first, span.stop) for span in spans])


def segment_sums(hidden: Tensor, spans: Sequence[Span]) -> Tensor:
    """The sum of each span, without its prompt, all in one call: float32 [spans, hidden]. Spans ascend.

    What lies between two of them is a segment, too. Each is summed by itself, so none sees another.
    """
    edges = [spans[0].start, *(edge for span in spans for edge in (span.first, span.stop))]
    lengths = upload([stop - start for start, stop in pairwise(edges)], hidden.device)
    rows = hidden[edges[0] : edges[-1]].float()
    return torch.segment_reduce(rows, "sum", lengths=lengths, unsafe=True)[1::2]


def _counts(hidden: Tensor, spans: Sequence[Span]) -> Tensor:
    counts = [max(1, span.stop - span.first) for span in spans]
    return upload(counts, hidden.device).float()[:, None]


_POOLERS: dict[Pooling, Callable[[Tensor, Sequence[Span]], Tensor]] = {
    Pooling.CLS: _cls,
    Pooling.LAST_TOKEN: _last_token,
    Pooling.MEAN: _mean,
    Pooling.MEAN_SQRT_LEN: _mean_sqrt_len,
    Pooling.WEIGHTED_MEAN: _weighted_mean,
    Pooling.MAX: _max,
}


def splade(hidden: Tensor, spans: Sequence[Span], logits: Callable[[Tensor], Tensor], rows: int) -> Iterator[Tensor]:
    """One vocabulary vector per span, float32 [vocabulary]: max over all its tokens of log(1 + relu(logit)).

    At most `rows` tokens' logits exist at a time. The logarithm is monotone, so it is taken once, of the maximum.
    Source: Formal et al., "SPLADE v2", 2021, equation 2.
    """
    tokens = torch.cat([hidden[span.start : span.stop] for span in spans])
    stops = torch.tensor([span.stop - span.start for span in spans]).cumsum(0).tolist()
    text, maximum = 0, None
    for start in range(0, len(tokens), rows):
        chunk = logits(tokens[start : start + rows]).float()
        done = 0
        while done < len(chunk):
            stop = min(stops[text] - start, len(chunk))
            peak = chunk[done:stop].amax(0)
            maximum = peak if maximum is None else torch.maximum(maximum, peak)
            done = stop
            if start + done == stops[text]:
                yield maximum.relu_().log1p_()
                text, maximum = text + 1, None
