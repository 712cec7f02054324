"""From a hub id or a directory to a folder of files. A directory never opens a connection."""

import errno
import logging
import os
import re
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from tei_grpc.config import EngineConfig
from tei_grpc.errors import StartupError
from tei_grpc.loading.progress import MB, download_bars
from tei_grpc.loading.sentence_transformers import AFTER_POOLING
from tei_grpc.loading.token_heads import COLBERT, LEXICAL

logger = logging.getLogger(__name__)

DESCRIPTION = ["*.json", "*.txt", "*.model", "*.jinja"]
SAFETENSORS = ["model.safetensors", "model-*.safetensors", "*/model.safetensors"]
TOKEN_HEADS = [LEXICAL, COLBERT]  # bge-m3 has them as pickles only
PICKLES = ["pytorch_model.bin", "pytorch_model-*.bin"]
FULL = (errno.ENOSPC, errno.EDQUOT)
NOT_WRITABLE = (errno.EACCES, errno.EPERM, errno.EROFS)
OTHER_RUNTIMES = ["onnx/*", "openvino/*", "coreml/*", "tf_model*", "flax_model*"]


class Snapshot(NamedTuple):
    """A folder with a checkpoint's files, and the commit they are from, where that is known."""

    folder: Path
    sha: str | None


def fetch(config: EngineConfig) -> Snapshot:
    """The folder of `config.model_id`: a directory as it is, else a hub id, from the cache or downloaded into it.

    Weights come as safetensors; pickles are fetched only where there are none. Raises StartupError.
    """
    folder = Path(os.path.expanduser(config.model_id))
    if os.path.isdir(folder):
        if config.revision is not None:
            logger.warning("`--revision` has no effect on a directory")
        return Snapshot(folder, _commit(folder.resolve()))
    if folder.is_absolute() or config.model_id.startswith((".", "~")):
        raise StartupError(f"`--model-id`: there is no directory `{config.model_id}`")
    folder = _download(config, DESCRIPTION + SAFETENSORS + TOKEN_HEADS)
    if pickles := _wanted_pickles(folder, config.dense_path):
        folder = _download(config, DESCRIPTION + SAFETENSORS + TOKEN_HEADS + pickles)
    return Snapshot(folder, _commit(folder))


def _wanted_pickles(folder: Path, dense_path: str | None) -> list[str]:
    """Patterns of the pickles of those folders, the model's own and its modules', that have no safetensors."""
    places = [folder, *(place for kind in AFTER_POOLING for place in sorted(folder.glob(f"*_{kind}")))]
    if dense_path and (folder / dense_path).is_relative_to(folder):
        places.append(folder / dense_path)
    bare = [place.relative_to(folder) for place in places if not any(place.glob("*.safetensors"))]
    return [str(place / name) for place in bare for name in PICKLES]


def _commit(folder: Path) -> str | None:
    """The hub's cache keeps each commit in a folder of its own: snapshots/<commit>."""
    return folder.name if folder.parent.name == "snapshots" and re.fullmatch("[0-9a-f]{40}", folder.name) else None


def _download(config: EngineConfig, patterns: list[str]) -> Path:
    from huggingface_hub import errors

    try:
        return Path(_snapshot(config, patterns))
    except errors.GatedRepoError as error:
        raise StartupError(
            f"`{config.model_id}` is gated: `--hf-token` must belong to an account with access"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise StartupError(
            f"`{config.model_id}` is neither a directory nor a model on the hub that `--hf-token` may read"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise StartupError(f"`{config.model_id}` has no `--revision` `{config.revision}`") from error
    except errors.HFValidationError as error:
        raise StartupError(f"`--model-id`: `{config.model_id}` is neither a directory nor a hub id") from error
    except errors.LocalEntryNotFoundError as error:
        raise StartupError(
            f"`{config.model_id}` is not in the cache, or not all of it, and the hub cannot be reached; "
            "give a directory, or fill the cache"
        ) from error
    except Exception as error:  # each release of the library has its own HTTP client, with its own errors
        raise StartupError(_explain(error, config, patterns)) from error


def _snapshot(config: EngineConfig, patterns: list[str], *, dry_run: bool = False) -> Any:
    """The folder; with `dry_run` a description of each of its files."""
    import huggingface_hub  # a directory does not need it, and it takes a while to import

    return huggingface_hub.snapshot_download(
        config.model_id,
        revision=config.revision,
        cache_dir=config.huggingface_hub_cache,
        token=None if config.hf_token is None else config.hf_token.get_secret_value(),
        library_name="tei-grpc",
        allow_patterns=patterns,
        ignore_patterns=OTHER_RUNTIMES,
        tqdm_class=download_bars(),
        dry_run=dry_run,
    )


def _explain(error: Exception, config: EngineConfig, patterns: list[str]) -> str:
    from huggingface_hub import constants

    cache = Path(config.huggingface_hub_cache or constants.HF_HUB_CACHE)
    number = error.errno if isinstance(error, OSError) else None
    if number in FULL:
        return f"`--huggingface-hub-cache` `{cache}` is full: {_room(config, patterns, cache)}"
    if number in NOT_WRITABLE and not os.access(cache, os.W_OK, effective_ids=True):
        return (
            f"`--huggingface-hub-cache` `{cache}` cannot be written by user {os.geteuid()}, and lacks files of "
            f"`{config.model_id}`; make it this user's, fill it elsewhere, or name one that can be written"
        )
    return f"`{config.model_id}` could not be downloaded: {error}"


def _room(config: EngineConfig, patterns: list[str], cache: Path) -> str:
    """What a full cache would need, as far as the hub and the file system tell."""
    text = f"there is no room for `{config.model_id}`"
    with suppress(Exception):  # whatever fails here, the disk is full all the same
        files = _snapshot(config, patterns, dry_run=True)
        missing = sum(file.file_size or 0 for file in files if file.will_download)
        free = shutil.disk_usage(cache).free
        text += f", of which {missing / MB:.1f} MB are missing, while {free / MB:.1f} MB are free"
    return text
