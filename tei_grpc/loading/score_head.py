"""A language model's vocabulary logits of one or two tokens, as the weight of a sequence classifier with one label."""

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from tei_grpc.errors import StartupError
from tei_grpc.loading.sentence_transformers import ScoreTokens
from tei_grpc.loading.weights import Checkpoint, Read

HEAD = "lm_head.weight"
WORDS = "embed_tokens.weight"
SCORE = "score.weight"


class ScoredCheckpoint(Checkpoint):
    """A checkpoint with one more tensor, `score.weight` [1, hidden]: the difference of two rows of the vocabulary head.

    (row_true - row_false) h = logit_true - logit_false, and its sigmoid is the softmax over the two logits.
    """

    def __init__(self, checkpoint: Checkpoint, tokens: ScoreTokens, hf_config: Mapping[str, Any]) -> None:
        self._checkpoint = checkpoint
        self._tokens = tokens
        self._tied = bool(hf_config.get("tie_word_embeddings", True))

    def names(self) -> list[str]:
        """Every tensor's name, that of the score included."""
        return [*self._checkpoint.names(), SCORE]

    def tensors(self) -> Iterator[tuple[str, Read]]:
        """Every tensor's name with the function that reads it."""
        yield from self._checkpoint.tensors()
        yield SCORE, self._read_score

    def _read_score(self, _: str) -> Tensor:
        name, read = self._vocabulary_head()
        rows = read(name)
        if rows.dim() != 2:
            raise StartupError(f"tensor `{name}` has shape {list(rows.shape)}; it must have a row for each token")
        if not all(0 <= token < len(rows) for token in self._tokens if token is not None):
            raise StartupError(f"tokens {tuple(self._tokens)} score pairs, but `{name}` has {len(rows)} rows")
        score = rows[self._tokens.true].float()
        if self._tokens.false is not None:
            score = score - rows[self._tokens.false].float()
        return score[None]

    def _vocabulary_head(self) -> tuple[str, Read]:
        stored = dict(self._checkpoint.tensors())
        heads = [name for name in stored if name.endswith(HEAD)]
        words = [name for name in stored if name.endswith(WORDS)]
        candidates = words if self._tied or not heads else heads
        if not candidates:
            raise StartupError(f"the checkpoint has neither `{HEAD}` nor `{WORDS}` to score pairs by")
        return candidates[0], stored[candidates[0]]
