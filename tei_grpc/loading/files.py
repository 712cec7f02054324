"""Small files of a checkpoint."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from tei_grpc.errors import StartupError

T = TypeVar("T")

LFS_MAGIC = b"version https://git-lfs"
LONGEST_PATH = 255  # bytes; no file system has longer names, and no checkpoint paths of several long ones
JSON_NAMES: Mapping[type, str] = {
    bool: "true or false",
    str: "a string",
    int: "a whole number",
    float: "a number",
    list: "a list",
    dict: "an object",
}


def read_object(file: Path) -> Mapping[str, Any]:
    """The JSON object in `file`. Raises StartupError naming it when it is missing or something else."""
    content = _read(file)
    if content is None:
        raise StartupError(f"`{file.name}` not found in `{file.parent}`")
    return _checked_object(content, file)


def read_optional_object(file: Path) -> Mapping[str, Any]:
    """The JSON object in `file`, empty when there is no such file. Raises StartupError for anything else."""
    content = _read(file)
    return {} if content is None else _checked_object(content, file)


def read_optional_objects(file: Path) -> list[Mapping[str, Any]]:
    """The JSON list of objects in `file`, empty when there is no such file. Raises StartupError for anything else."""
    content = _read(file)
    if not isinstance(content, list | None):
        raise StartupError(f"`{file}` must hold a JSON list")
    return [_checked_object(element, file) for element in content or ()]


def read_value(content: Mapping[str, Any], key: str, kind: type[T], file: str) -> T | None:
    """`content[key]`, None when it is absent or null. Raises StartupError naming `file` when it is no `kind`.

    A `float` may be written as a whole number.
    """
    value = content.get(key)
    if value is None:
        return None
    kinds: Any = (int, float) if kind is float else kind
    if isinstance(value, bool) is not (kind is bool) or not isinstance(value, kinds):
        raise StartupError(f"`{file}`: `{key}` must be {JSON_NAMES[kind]}, not {value!r:.100}")
    found: T = value
    return found


def read_strings(content: Mapping[str, Any], key: str, file: str) -> list[str]:
    """The list of strings `content[key]`, empty when it is absent or null. Raises StartupError as `read_value` does."""
    strings = read_value(content, key, list, file) or []
    if not all(isinstance(string, str) for string in strings):
        raise StartupError(f"`{file}`: `{key}` must be a list of strings, not {strings!r:.100}")
    return strings


def check_inside(path: str, source: str) -> None:
    """Raise StartupError when `path`, which the file `source` names, leads out of the checkpoint's directory."""
    if Path(path).is_absolute() or ".." in Path(path).parts or len(path.encode("utf-8", "replace")) > LONGEST_PATH:
        raise StartupError(f"`{source}` names `{path:.100}`, which is not in the checkpoint's directory")


def check_no_pointer(file: Path) -> None:
    """Raise StartupError when `file` is the pointer that Git LFS leaves in place of one that was not fetched."""
    with file.open("rb") as stream:
        if stream.read(len(LFS_MAGIC)) == LFS_MAGIC:
            raise StartupError(f"{file} is a Git LFS pointer, not the file itself; fetch it with `git lfs pull`")


def _checked_object(content: object, file: Path) -> Mapping[str, Any]:
    if not isinstance(content, dict):
        raise StartupError(f"`{file}` must hold a JSON object")
    return content


def _read(file: Path) -> object:
    try:
        if file.exists() and not file.is_file():
            raise StartupError(f"`{file}` is not a file")
        check_no_pointer(file)
        content: object = json.loads(file.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise StartupError(f"`{file}` cannot be read as JSON: {error}") from error
    if content is None:
        raise StartupError(f"`{file}` holds nothing but null")
    return content
