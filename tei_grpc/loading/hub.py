"""From a hub id or a directory to a folder of files. A directory never opens a connection."""

import logging
import os
import re
from pathlib import Path
from typing import NamedTuple

from tei_grpc.config import EngineConfig
from tei_grpc.errors import StartupError
from tei_grpc.loading.progress import download_bars
from tei_grpc.loading.sentence_transformers import AFTER_POOLING
from tei_grpc.loading.token_heads import COLBERT, LEXICAL

logger = logging.getLogger(__name__)

DESCRIPTION = ["*.json", "*.txt", "*.model", "*.jinja"]
SAFETENSORS = ["model.safetensors", "model-*.safetensors", "*/model.safetensors"]
TOKEN_HEADS = [LEXICAL, COLBERT]  # bge-m3 has them as pickles only
PICKLES = ["pytorch_model.bin", "pytorch_model-*.bin"]
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
    import huggingface_hub  # a directory does not need it, and it takes a while to import
    from huggingface_hub import errors

    try:
        return Path(
            huggingface_hub.snapshot_download(
                config.model_id,
                revision=config.revision,
                cache_dir=config.huggingface_hub_cache,
                token=None if config.hf_token is None else config.hf_token.get_secret_value(),
                library_name="tei-grpc",
                allow_patterns=patterns,
                ignore_patterns=OTHER_RUNTIMES,
                tqdm_class=download_bars(),
            )
        )
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
            f"`{config.model_id}` is not in the cache, and the hub cannot be reached; "
            "give a directory, or fill the cache"
        ) from error
    except Exception as error:  # each release of the library has its own HTTP client, with its own errors
        raise StartupError(f"`{config.model_id}` could not be downloaded: {error}") from error
