"""Owns reading a checkpoint's tensors, one by one, into a module that was built on the meta device."""

import logging
import pickle
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from tei_grpc.errors import StartupError
from tei_grpc.loading.failures import library_errors
from tei_grpc.loading.files import check_inside, check_no_pointer, read_object, read_value
from tei_grpc.loading.progress import Progress

logger = logging.getLogger(__name__)

COMMON_PREFIXES = ("0.auto_model.", "model.")
DERIVED = ".rotary_emb.inv_freq"  # a buffer that older releases of transformers stored
NAMES_SHOWN = 5
OTHER_FORMATS = {
    "ONNX": "**/*.onnx",
    "OpenVINO": "openvino/*.xml",
    "TensorFlow": "tf_model*.h5",
    "Flax": "flax_model*",
    "GGUF": "*.gguf",
}

Read = Callable[[str], Tensor]


@dataclass(frozen=True, slots=True)
class Names:
    """How a checkpoint's tensor names become a module's."""

    prefixes: tuple[str, ...] = ()  # dropped from the front, as often as they are there
    renamed: Mapping[str, str] = field(default_factory=dict)  # endings
    extras: tuple[str, ...] = ()  # beginnings of names that may lie unused

    def plain(self, name: str) -> str:
        """The module's name for a checkpoint's tensor."""
        while prefix := next((p for p in COMMON_PREFIXES + self.prefixes if name.startswith(p)), None):
            name = name.removeprefix(prefix)
        for old, new in self.renamed.items():
            if name.endswith(old):
                return name.removesuffix(old) + new
        return name


class Checkpoint:
    """The tensors of a folder: model.safetensors, its shards, or pytorch_model.bin, whichever is there first.

    Nothing but names is read before `tensors` is walked. Raises StartupError, naming the file, when one is missing,
    is cut short, is a Git LFS pointer, or is a pickle that holds more than tensors.
    """

    def __init__(self, folder: Path) -> None:
        self._files: dict[Path, Mapping[str, Read]] = {file: _open(file) for file in _weight_files(folder)}

    def names(self) -> list[str]:
        """Every tensor's name, as stored."""
        return [name for file in self._files.values() for name in file]

    def tensors(self) -> Iterator[tuple[str, Read]]:
        """Every tensor's name with the function that reads it."""
        for file in self._files.values():
            yield from file.items()


class CheckpointFile(Checkpoint):
    """The tensors of one file. Raises StartupError as `Checkpoint` does."""

    def __init__(self, file: Path) -> None:
        self._files = {file: _open(file)}


def load_weights(module: nn.Module, checkpoint: Checkpoint, names: Names, *, dtype: torch.dtype) -> None:
    """Give the module real memory on the CPU and fill it, casting floats to `dtype`.

    A module with an `on_disk` method says itself under which names its tensors are stored.
    Raises StartupError naming the tensors that are missing, unexpected or of another shape.
    """
    _allocate(module, dtype)
    wanted = dict(_slots(module))
    missing, unexpected = set(wanted), []
    converted: set[torch.dtype] = set()
    progress = Progress("Loading weights", sum(slot.numel() for slot in wanted.values()))
    for stored, read in checkpoint.tensors():
        name = names.plain(stored)
        if name in wanted:
            tensor = read(stored)
            _fill(wanted[name], tensor, stored)
            converted |= {tensor.dtype} - {dtype}
            missing.discard(name)
            progress.advance(tensor.numel())
        elif not (name.startswith(names.extras) or name.endswith(DERIVED)):
            unexpected.append(stored)
    if converted:
        logger.warning(
            "weights are stored as %s and run as %s", " and ".join(sorted(map(_name, converted))), _name(dtype)
        )
    refuse_tensors("the checkpoint lacks", missing)
    refuse_tensors("the checkpoint holds unexpected", unexpected)


def _allocate(module: nn.Module, dtype: torch.dtype) -> None:
    """As `to_empty`, which imports sympy for it: 30 MB and half a second."""
    for owner in module.eval().modules():
        for name, parameter in list(owner.named_parameters(recurse=False)):
            setattr(owner, name, nn.Parameter(_empty(parameter.shape, dtype), requires_grad=False))


def _empty(shape: torch.Size, dtype: torch.dtype) -> Tensor:
    try:
        return torch.empty(shape, dtype=dtype)
    except RuntimeError as error:
        raise StartupError(f"no memory for a tensor of shape {list(shape)}, which the config describes") from error


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _slots(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for path, owner in module.named_modules():
        prefix = f"{path}." if path else ""
        on_disk = getattr(owner, "on_disk", None)
        tensors = on_disk() if on_disk else dict(owner.named_parameters(recurse=False))
        yield from ((prefix + name, tensor) for name, tensor in tensors.items())


def _fill(slot: Tensor, tensor: Tensor, name: str) -> None:
    if tensor.shape != slot.shape:
        raise StartupError(f"tensor `{name}` has shape {list(tensor.shape)}, the model needs {list(slot.shape)}")
    if not tensor.is_floating_point():
        raise StartupError(f"tensor `{name}` has dtype {tensor.dtype}, the model needs floating point")
    with library_errors(f"tensor `{name}` cannot be read"):  # pickles may hold sparse ones, or some without values
        slot.copy_(tensor)


def refuse_tensors(what: str, names: Collection[str]) -> None:
    """Raise StartupError saying `what` is wrong with the tensors of these names, if there are any."""
    if not names:
        return
    shown = sorted(names)
    more = f" and {len(shown) - NAMES_SHOWN} more" if len(shown) > NAMES_SHOWN else ""
    raise StartupError(f"{what} tensors: {', '.join(f'`{name}`' for name in shown[:NAMES_SHOWN])}{more}")


def _weight_files(folder: Path) -> list[Path]:
    for name in ("model.safetensors", "pytorch_model.bin"):
        if (folder / name).is_file():
            return [folder / name]
        if (folder / f"{name}.index.json").is_file():
            return _shards(folder / f"{name}.index.json")
    other = next((kind for kind, pattern in OTHER_FORMATS.items() if any(folder.glob(pattern))), None)
    reason = f"it has them for {other} only, which is not supported" if other else "ONNX and other formats are not read"
    raise StartupError(f"no weights in {folder}: neither model.safetensors nor pytorch_model.bin is there; {reason}")


def _shards(index: Path) -> list[Path]:
    weight_map = read_value(read_object(index), "weight_map", dict, index.name)
    if not weight_map:
        raise StartupError(f"`{index}` names no weight files: it has no `weight_map`")
    if not all(isinstance(shard, str) for shard in weight_map.values()):
        raise StartupError(f"`{index}`: `weight_map` must map tensors to names of files")
    shards = sorted(set(weight_map.values()))
    files = [index.parent / shard for shard in shards]
    for shard, file in zip(shards, files, strict=True):
        check_inside(shard, index.name)
        if not file.is_file():
            raise StartupError(f"weight file {file} is missing, although {index.name} names it")
    return files


def _open(file: Path) -> Mapping[str, Read]:
    check_no_pointer(file)
    return _open_safetensors(file) if file.suffix == ".safetensors" else _open_pickle(file)


def _open_safetensors(file: Path) -> Mapping[str, Read]:
    try:
        tensors: Any = safe_open(file, framework="pt")
    except SafetensorError as error:
        raise StartupError(f"{file} is damaged or cut short") from error

    def read(name: str) -> Tensor:
        with library_errors(f"tensor `{name}` of {file} cannot be read"):
            tensor: Tensor = tensors.get_tensor(name)
            return tensor

    return dict.fromkeys(tensors.keys(), read)


def _open_pickle(file: Path) -> Mapping[str, Read]:
    try:
        tensors = torch.load(file, map_location="cpu", weights_only=True, mmap=_is_zip(file))
    except pickle.UnpicklingError as error:
        raise StartupError(f"{file} holds more than tensors and could run code; it is refused") from error
    except Exception as error:  # the unpickler raises whatever damaged bytes lead it to
        raise StartupError(f"{file} is damaged or cut short") from error
    if not isinstance(tensors, dict) or not all(isinstance(name, str) for name in tensors):
        raise StartupError(f"{file} holds no dictionary of tensors by name")
    return dict.fromkeys((name for name, value in tensors.items() if isinstance(value, Tensor)), tensors.__getitem__)


def _is_zip(file: Path) -> bool:
    with file.open("rb") as stream:
        return stream.read(4) == b"PK\x03\x04"
