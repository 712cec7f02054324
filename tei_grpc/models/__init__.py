"""Owns the registry of model families: one file per family, found by what a checkpoint's config says.

A family is a torch module whose attribute names are the checkpoint's tensor names, so that no name table is needed.
Files in this package are imported when a model is looked up, as are those that other packages announce; there is no
list to edit.
"""

import importlib
import pkgutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib.metadata import entry_points
from typing import ClassVar, TypeVar

from torch import Tensor, nn

from tei_grpc.layers.blueprint import Blueprint, Head, HfConfig
from tei_grpc.layers.packed import PackedInputs
from tei_grpc.loading.weights import Names

__all__ = ["Blueprint", "Head", "HfConfig", "Model", "families", "find_family", "model_types", "register"]

ENTRY_POINTS = "tei_grpc.models"


class Model(nn.Module):
    """The base of all families. Built on the meta device; weights are loaded afterwards."""

    heads: ClassVar[frozenset[Head]] = frozenset({Head.NONE})
    optimized: ClassVar[bool] = True  # packed, in our own implementation
    names: ClassVar[Names] = Names()

    hidden_size: int  # values of a token vector

    def __init__(self, blueprint: Blueprint) -> None:
        super().__init__()

    def encode(self, inputs: PackedInputs) -> Tensor:
        """Hidden states, [tokens, hidden]."""
        raise NotImplementedError

    def after_pooling(self, vectors: Tensor) -> Tensor:
        """What the family does to pooled vectors, float32 [texts, hidden], before any Dense module: mostly nothing."""
        return vectors

    def classify(self, hidden: Tensor, inputs: PackedInputs) -> Tensor:
        """Logits of the classification head, [texts, labels]."""
        raise NotImplementedError

    def vocabulary_logits(self, hidden: Tensor) -> Tensor:
        """Logits of the masked-language-modelling head, [rows, hidden] -> [rows, vocabulary]."""
        raise NotImplementedError


Family = TypeVar("Family", bound=type[Model])
Matches = Callable[[HfConfig], bool]


@dataclass(frozen=True, slots=True)
class _Entry:
    model_types: tuple[str, ...]
    matches: Matches | None
    family: type[Model]

    def fits(self, config: HfConfig) -> bool:
        return config.get("model_type") in self.model_types and (self.matches is None or self.matches(config))


_entries: list[_Entry] = []


def register(*model_types: str, matches: Matches | None = None) -> Callable[[Family], Family]:
    """Enter a family under the `model_type`s of config.json that it serves.

    `matches` narrows it to some of the checkpoints of those types; such a family is preferred to one without.
    """

    def enter(family: Family) -> Family:
        _entries.append(_Entry(model_types, matches, family))
        return family

    return enter


def find_family(config: HfConfig) -> type[Model] | None:
    """The family that serves a checkpoint; None when that is left to the generic path."""
    _import_families()
    fitting = [entry for entry in _entries if entry.fits(config)]
    return max(fitting, key=lambda entry: entry.matches is not None).family if fitting else None


def families() -> list[tuple[str, type[Model]]]:
    """Every supported `model_type` with a family that serves it, sorted; a type may have several."""
    _import_families()
    pairs = {(name, entry.family) for entry in _entries for name in entry.model_types}
    return sorted(pairs, key=lambda pair: (pair[0], pair[1].__name__))


def model_types() -> list[str]:
    """Every supported `model_type`, sorted."""
    _import_families()
    return sorted({name for entry in _entries for name in entry.model_types})


def _import_families() -> None:
    for name in _module_names():
        importlib.import_module(name)
    _load_installed_families()


@cache
def _load_installed_families() -> None:
    """Families of other packages, which name their modules in this group of entry points."""
    for point in entry_points(group=ENTRY_POINTS):
        point.load()


def _module_names() -> Iterator[str]:
    return (module.name for module in pkgutil.iter_modules(__path__, prefix=f"{__name__}."))
