"""Owns loading a checkpoint into a class of transformers, as strictly as into one of ours.

transformers is an optional dependency: it is imported when a model needs it, and nowhere else in the server.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from tei_grpc.errors import StartupError
from tei_grpc.loading.failures import library_errors
from tei_grpc.loading.weights import Checkpoint, refuse_tensors

LOCAL = {"local_files_only": True, "trust_remote_code": False}
BUFFERS = ("position_ids", "token_type_ids", "rotary_emb.inv_freq")  # no weights; older releases stored them
HEAD_MAPPINGS = (
    "MODEL_FOR_PRETRAINING_MAPPING",
    "MODEL_FOR_MASKED_LM_MAPPING",
    "MODEL_FOR_CAUSAL_LM_MAPPING",
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING",
    "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING",
    "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING",
    "MODEL_FOR_QUESTION_ANSWERING_MAPPING",
)


def import_transformers(hf_config: Mapping[str, Any]) -> Any:
    """The library, silent. Raises StartupError naming the extra that installs it."""
    try:
        import transformers
    except ImportError as error:
        raise StartupError(
            f"`model_type` {hf_config.get('model_type')!r} is run by transformers, which is not installed: "
            "pip install 'tei-grpc[generic]'"
        ) from error
    library: Any = transformers
    library.logging.set_verbosity_error()  # what matters in its reports becomes an error of ours
    library.logging.disable_progress_bar()
    return library


def check_native(transformers: Any, hf_config: Mapping[str, Any], *, supported: Sequence[str]) -> None:
    """Raise StartupError for an architecture that transformers lacks; `supported` are the model types of our own."""
    model_type, code = hf_config.get("model_type"), hf_config.get("auto_map")
    architectures = hf_config.get("architectures") or []
    known = model_type in transformers.CONFIG_MAPPING
    if code and not (known and all(hasattr(transformers, name) for name in architectures)):
        raise StartupError(
            f"config.json asks for the publisher's code, {_code_files(code)}, and such code is never run; "
            f"transformers {transformers.__version__} itself does not know `model_type` {model_type!r} with "
            f"`architectures` {architectures}"
        )
    if not known:
        raise StartupError(
            f"`model_type` {model_type!r} is not supported; supported are: {', '.join(supported)}, "
            f"and what transformers {transformers.__version__} knows"
        )


def _code_files(auto_map: object) -> str:
    names = auto_map.values() if isinstance(auto_map, Mapping) else [auto_map]
    return ", ".join(f"`{name}`" for name in sorted(map(str, names)))


def read_config(transformers: Any, folder: Path) -> Any:
    """config.json as transformers reads it, for running without a cache of keys. Raises StartupError."""
    with library_errors(f"transformers {transformers.__version__} cannot read config.json"):
        config = transformers.AutoConfig.from_pretrained(folder, **LOCAL)  # nosec B615 # nothing is downloaded
    config.use_cache = False
    return config


def load(auto: Any, folder: Path, config: Any, *, dtype: torch.dtype, unused: Sequence[str]) -> Any:
    """A model of the class that `auto` picks, on the CPU, ready to run.

    Tensors may be missing only below a module that `unused` names. Tensors of another head of the same architecture
    may lie unused. Raises StartupError naming all others that are missing, unexpected or of another shape.
    """
    Checkpoint(folder)  # says better than transformers what is wrong with a file
    options = {"config": config, "dtype": dtype, "output_loading_info": True, "ignore_mismatched_sizes": True}
    with library_errors("transformers cannot load the checkpoint"):
        model, found = auto.from_pretrained(folder, **options, **LOCAL)
    shapes = [f"{name} (has {list(has)}, needs {list(needs)})" for name, has, needs in found["mismatched_keys"]]
    refuse_tensors("the checkpoint has another shape for", shapes)
    refuse_tensors("the checkpoint lacks", [name for name in found["missing_keys"] if not _is_below(name, unused)])
    refuse_tensors("the checkpoint holds unexpected", _strangers(found["unexpected_keys"], config))
    return model.eval().requires_grad_(False)


def _is_below(name: str, modules: Sequence[str]) -> bool:
    return any(part in modules for part in name.split(".")[:-1])


def _strangers(unexpected: Sequence[str], config: Any) -> list[str]:
    left = [name for name in unexpected if not name.endswith(BUFFERS) and not _is_below(name, ("pooler",))]
    if not left:
        return []
    known = set(_names_of_heads(config))
    return [name for name in left if name not in known]


def _names_of_heads(config: Any) -> Iterator[str]:
    """The tensors of every class that transformers has for this architecture."""
    import transformers

    for mapping in HEAD_MAPPINGS:
        found = getattr(transformers, mapping).get(type(config), ())
        for model_class in found if isinstance(found, tuple) else (found,):
            with torch.device("meta"), suppress(Exception):  # some heads insist on two labels, for example
                yield from model_class(config).state_dict()
