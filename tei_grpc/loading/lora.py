"""Owns the low-rank adaptations that a checkpoint carries beside its weights, one for each task (Jina v3)."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tei_grpc.errors import StartupError
from tei_grpc.loading.failures import library_errors
from tei_grpc.loading.files import read_strings, read_value
from tei_grpc.loading.model_config import CONFIG
from tei_grpc.loading.weights import Checkpoint, Read

LEVEL = ".parametrizations.weight."  # of X.weight: X.parametrizations.weight.original, .0.lora_A and .0.lora_B


class AdaptedCheckpoint(Checkpoint):
    """A checkpoint whose weights come out adapted to one task, or as they were before any adaptation.

    A weight W becomes W + scale * B[task] A[task], for embeddings A[task] B[task].
    Hu et al. 2021, https://arxiv.org/abs/2106.09685, equation 3.
    """

    def __init__(self, folder: Path, task: int | None, scale: float) -> None:
        super().__init__(folder)
        self._task = task
        self._scale = scale

    def names(self) -> list[str]:
        """Every tensor's name, as if the checkpoint had no adaptations."""
        return [name for name, _ in self.tensors()]

    def tensors(self) -> Iterator[tuple[str, Read]]:
        """Every weight under its usual name, with a function that reads and adapts it."""
        stored = dict(super().tensors())
        for name, read in stored.items():
            owner, level, part = name.partition(LEVEL)
            if not level:
                yield name, read
            elif part == "original":
                yield f"{owner}.weight", self._adapting(stored, owner + level)

    def _adapting(self, stored: Mapping[str, Read], level: str) -> Read:
        def read(_: str) -> Tensor:
            weight = stored[f"{level}original"](f"{level}original")
            if self._task is None:
                return weight
            with library_errors(f"the adaptation `{level}0` does not fit its weight"):
                a, b = (_read(stored, f"{level}0.{part}")[self._task].float() for part in ("lora_A", "lora_B"))
                left, right = (a, b) if len(a) == len(weight) else (b, a)
                return torch.addmm(weight.float(), left, right, alpha=self._scale)

        return read


def _read(stored: Mapping[str, Read], name: str) -> Tensor:
    if name not in stored:
        raise StartupError(f"the checkpoint lacks tensor `{name}`")
    return stored[name](name)


def open_checkpoint(folder: Path, hf_config: Mapping[str, Any], task: str | None) -> Checkpoint:
    """The tensors of a folder, adapted to `task` if one is given.

    Raises StartupError naming the adaptations that there are when `task` is none of them.
    """
    plain = Checkpoint(folder)
    adapted = any(LEVEL in name for name in plain.names())
    tasks = read_strings(hf_config, "lora_adaptations", CONFIG) if adapted else []
    if task is not None and task not in tasks:
        known = f"it has: {', '.join(tasks)}" if tasks else "it has none"
        raise StartupError(f"`--lora-task` {task!r} is not among the model's LoRA adaptations; {known}")
    if not adapted:
        return plain
    return AdaptedCheckpoint(folder, None if task is None else tasks.index(task), _scale(hf_config))


def _scale(hf_config: Mapping[str, Any]) -> float:
    alpha, rank = (read_value(hf_config, f"lora_{name}", float, CONFIG) for name in ("alpha", "rank"))
    try:
        return (1 if alpha is None else alpha) / (4 if rank is None else rank)  # Jina's defaults
    except ArithmeticError as error:
        raise StartupError(f"`{CONFIG}`: `lora_alpha` {alpha} and `lora_rank` {rank} are no scale") from error
