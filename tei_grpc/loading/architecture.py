"""What a checkpoint without `architectures` in config.json is, told from the names of its tensors. Needs no torch."""

import json
import logging
from collections.abc import Iterable
from pathlib import Path

from tei_grpc.errors import StartupError

logger = logging.getLogger(__name__)

MASKED_LM = "ForMaskedLM"
SEQUENCE_CLASSIFICATION = "ForSequenceClassification"
MASKED_LM_HEADS = (  # endings of names: BERT, RoBERTa, DistilBERT, DeBERTa v2, ModernBERT
    *("cls.predictions.bias", "lm_head.layer_norm.weight", "vocab_layer_norm.weight"),
    *("lm_predictions.lm_head.dense.weight", "decoder.bias"),
)
CLASSIFIER_HEADS = ("classifier.out_proj.weight", "pre_classifier.weight")  # no token classifier has these
ANY_CLASSIFIER_HEADS = ("classifier.weight", "score.weight")  # of a sequence or of every token
POOLER = "pooler.dense.weight"
LARGEST_HEADER = 100_000_000  # bytes; the limit of the safetensors library, too


def infer_architectures(folder: Path, *, pooled: bool) -> tuple[str, ...]:
    """The ending of the class that the tensors are of, if they have a head; `pooled`: something says how to pool.

    A checkpoint that is to be pooled is no classifier, whatever heads it has. Raises StartupError when a head can be of
    two kinds, which matters.
    """
    names = tensor_names(folder)
    if found := _infer(names, pooled):
        logger.warning("`config.json` names no `architectures`; by its tensors, the model is one %s", found)
        return (found,)
    head = next((name for name in ANY_CLASSIFIER_HEADS if name in names), None)
    if head is None or pooled:
        return ()
    raise StartupError(
        f"`config.json` names no `architectures`, and tensor `{head}` can be a sequence classifier's or a token "
        'classifier\'s; add the name of the class, like "architectures": ["BertForSequenceClassification"], '
        "or embed with `--pooling`"
    )


def _infer(names: frozenset[str], pooled: bool) -> str | None:
    if _any_ends(names, MASKED_LM_HEADS):
        return MASKED_LM
    if pooled:
        return None
    has_pooler = "classifier.weight" in names and _any_ends(names, (POOLER,))
    return SEQUENCE_CLASSIFICATION if has_pooler or names.intersection(CLASSIFIER_HEADS) else None


def _any_ends(names: Iterable[str], endings: tuple[str, ...]) -> bool:
    return any(name.endswith(endings) for name in names)


def tensor_names(folder: Path) -> frozenset[str]:
    """The names in the header of the weights or in the index of their shards; none where only a pickle holds them.

    What is wrong with a file, whoever reads its tensors says.
    """
    try:
        for index in ("model.safetensors.index.json", "pytorch_model.bin.index.json"):
            if (folder / index).is_file() and not (folder / "model.safetensors").is_file():
                return frozenset({**json.loads((folder / index).read_bytes())["weight_map"]})
        return frozenset(_read_header(folder / "model.safetensors")) - {"__metadata__"}
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return frozenset()


def _read_header(file: Path) -> Iterable[str]:
    """A safetensors file starts with the length of its header, a JSON object, in 8 bytes, little-endian."""
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        return {**json.loads(stream.read(min(length, LARGEST_HEADER)))}
