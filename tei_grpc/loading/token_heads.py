"""bge-m3's heads on token vectors, beside its pooled vector: what is there of them in a checkpoint."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tei_grpc.errors import StartupError
from tei_grpc.loading.files import read_optional_object
from tei_grpc.loading.tokenizer_files import TOKENIZER_CONFIG, read_tokenizer, token_text

logger = logging.getLogger(__name__)

LEXICAL = "sparse_linear.pt"
COLBERT = "colbert_linear.pt"
DROPPED = ("cls_token", "bos_token", "eos_token", "sep_token", "pad_token", "unk_token")  # have no lexical weight


@dataclass(frozen=True, slots=True)
class TokenHeads:
    """Files of the heads that are served."""

    lexical: Path | None = None
    colbert: Path | None = None
    dropped_ids: frozenset[int] = frozenset()  # tokens without a lexical weight


def read_token_heads(folder: Path, hf_config: Mapping[str, Any], *, colbert: bool) -> TokenHeads:
    """The heads of an embedding model. Raises StartupError when `--colbert` asks for one that is not there."""
    lexical = folder / LEXICAL
    if colbert and not (folder / COLBERT).is_file():
        raise StartupError(f"`--colbert`: the model has no ColBERT head, `{COLBERT}`")
    has_lexical = lexical.is_file()
    if has_lexical:
        logger.info("EmbedSparse answers with lexical weights, by `%s`", LEXICAL)
    if colbert:
        logger.info("EmbedAll answers with ColBERT vectors, by `%s`", COLBERT)
    return TokenHeads(
        lexical=lexical if has_lexical else None,
        colbert=folder / COLBERT if colbert else None,
        dropped_ids=_special_ids(folder, hf_config) if has_lexical else frozenset(),
    )


def _special_ids(folder: Path, hf_config: Mapping[str, Any]) -> frozenset[int]:
    config = read_optional_object(folder / TOKENIZER_CONFIG)
    named = {name: config[name] for name in DROPPED if config.get(name) is not None}
    texts = [token_text(token, name, TOKENIZER_CONFIG) for name, token in named.items()]
    tokenizer = read_tokenizer(folder, hf_config)
    ids = (tokenizer.token_to_id(text) for text in texts)
    return frozenset(token for token in ids if token is not None)
