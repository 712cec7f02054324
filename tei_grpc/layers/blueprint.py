"""Owns what a model is built from: its config, its head, and the names of the tensors that are stored for it."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from tei_grpc.errors import StartupError

HfConfig = Mapping[str, Any]


class Head(StrEnum):
    """What sits on top of the encoder."""

    NONE = "none"
    CLASSIFICATION = "sequence classification"
    MASKED_LM = "masked language modelling"


@dataclass(frozen=True, slots=True)
class Blueprint:
    """What a family builds itself from."""

    config: HfConfig  # config.json
    head: Head
    labels: int  # of the classification head
    tensors: frozenset[str]  # the checkpoint's tensor names, without the family's prefixes

    def is_tied(self, decoder: str) -> bool:
        """The tensor `decoder` of a masked-language-modelling head is not stored, because it is the word embeddings."""
        return decoder not in self.tensors and bool(self.config.get("tie_word_embeddings", True))

    def check_values(self, supported: Mapping[str, Any]) -> None:
        """Raise StartupError for a key of config.json with another value than the one supported; absent will do."""
        for key, value in supported.items():
            if self.config.get(key) not in (None, value):
                raise StartupError(f"`{key}` {self.config[key]!r} in config.json is not supported, only {value!r} is")
