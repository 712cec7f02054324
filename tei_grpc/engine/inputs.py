"""How what a caller of the engine gives becomes an input. Pure functions."""

from tei_grpc.types import Input, Scoring


def as_input(input: Input | str) -> Input:
    """A text alone has all defaults."""
    return Input(input) if isinstance(input, str) else input


def as_scored(text: str, pair: str | None = None, *, scoring: Scoring) -> Input:
    """A text, or a pair of texts, for a classifier or a reranker."""
    return Input(text, pair, truncate=scoring.truncate, truncation_direction=scoring.truncation_direction)
