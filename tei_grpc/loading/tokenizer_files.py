"""A checkpoint's tokenizer: its tokenizer.json, or one made of the vocabulary files that older checkpoints have.

WordPiece and byte-level vocabularies are read here; SentencePiece and rarer kinds by transformers, which is optional.
The publisher's code is never run.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from tei_grpc.errors import StartupError
from tei_grpc.loading.failures import library_errors
from tei_grpc.loading.files import check_no_pointer, read_optional_object, read_value

TOKENIZER = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
SPECIAL_TOKENS = "special_tokens_map.json"
ADDED_TOKENS = "added_tokens.json"
MAX_DIGITS = 10  # of a token's id
WORD_PIECE_CLASSES = ("BertTokenizer", "DistilBertTokenizer", "ElectraTokenizer", "MobileBertTokenizer")
ROBERTA_CLASSES = ("RobertaTokenizer", "LongformerTokenizer")
CLASS_OF_MODEL_TYPE = {  # where no tokenizer_config.json names one
    **dict.fromkeys(("bert", "distilbert", "electra", "nomic_bert"), "BertTokenizer"),
    "roberta": "RobertaTokenizer",
    "gpt2": "GPT2Tokenizer",
}
VOCABULARIES = ("vocab.txt", "vocab.json", "sentencepiece.bpe.model", "spiece.model", "spm.model", "tokenizer.model")
GTE_QWEN2 = "modeling_qwen.Qwen2Model"
END_OF_TEXT = "<|endoftext|>"


def read_tokenizer(folder: Path, hf_config: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer of `folder`, whose config.json is `hf_config`. Raises StartupError."""
    file = folder / TOKENIZER
    tokenizer = _read(file) if file.is_file() else _convert(folder, hf_config)
    if is_gte_qwen2(hf_config):
        with library_errors(f"the tokenizer of `{folder}` fails at any text"):
            _end_with(tokenizer, END_OF_TEXT)
    return tokenizer


def _read(file: Path) -> Tokenizer:
    check_no_pointer(file)
    with library_errors(f"`{file}` cannot be read by tokenizers {tokenizers.__version__}"):
        return Tokenizer.from_file(str(file))


def _convert(folder: Path, hf_config: Mapping[str, Any]) -> Tokenizer:
    found = next((folder / name for name in VOCABULARIES if (folder / name).is_file()), None)
    if found is None:
        raise StartupError(f"`{TOKENIZER}` not found in `{folder}`, nor a vocabulary: {', '.join(VOCABULARIES)}")
    check_no_pointer(found)
    config = _TokenizerConfig(folder)
    converter = _converter(config.class_name or CLASS_OF_MODEL_TYPE.get(str(hf_config.get("model_type")), ""), folder)
    if converter is None:
        return _convert_by_transformers(folder, found)
    with library_errors(f"`{found}` cannot be made into `{TOKENIZER}`"):
        tokenizer = converter(folder, config)
        tokenizer.add_tokens(config.added_tokens())
        return tokenizer


class _TokenizerConfig:
    """tokenizer_config.json, with the special tokens that older checkpoints have in files of their own."""

    def __init__(self, folder: Path) -> None:
        self._values = read_optional_object(folder / TOKENIZER_CONFIG)
        self._special = {**read_optional_object(folder / SPECIAL_TOKENS), **self._values}
        self._added = read_optional_object(folder / ADDED_TOKENS)
        name = read_value(self._values, "tokenizer_class", str, TOKENIZER_CONFIG) or ""
        self.class_name = name.removesuffix("Fast")
        self._named: dict[str, AddedToken] = {}

    def flag(self, key: str, default: bool | None) -> Any:
        """A boolean; None where the default says so."""
        value = read_value(self._values, key, bool, TOKENIZER_CONFIG)
        return default if value is None else value

    def special(self, key: str, default: str) -> str:
        """The text of a special token, `cls_token` for example; `added_tokens` then lists it, too."""
        stated = self._special.get(key)
        token = _added_token(default if stated in (None, "") else stated, key, self._file(key), special=True)
        self._named[key] = token
        return token.content

    def added_tokens(self) -> list[AddedToken]:
        """Tokens beside the vocabulary, in the order of their ids, and the special ones."""
        key, file = "additional_special_tokens", self._file("additional_special_tokens")
        more = read_value(self._special, key, list, file) or []
        listed = self._listed_tokens()
        known = {token.content for token in listed}
        special = [*self._named.values(), *(_added_token(token, key, file, special=True) for token in more)]
        return listed + [token for token in special if token.content not in known]

    def _listed_tokens(self) -> list[AddedToken]:
        key = "added_tokens_decoder"
        decoder = read_value(self._values, key, dict, TOKENIZER_CONFIG) or {}
        if decoder:
            return [
                _added_token(decoder[id], key, TOKENIZER_CONFIG, special=False) for id in sorted(decoder, key=_number)
            ]
        ids = {text: read_value(self._added, text, int, ADDED_TOKENS) or 0 for text in self._added}
        return [_added_token(text, text, ADDED_TOKENS, special=False) for text in sorted(ids, key=ids.__getitem__)]

    def _file(self, key: str) -> str:
        return TOKENIZER_CONFIG if key in self._values else SPECIAL_TOKENS


def _number(id: str) -> int:
    if not id.isdecimal() or len(id) > MAX_DIGITS:
        raise StartupError(f"`{TOKENIZER_CONFIG}`: `added_tokens_decoder` must have ids as keys, not {id!r:.100}")
    return int(id)


def token_text(value: object, key: str, file: str) -> str:
    """The text of a token that `file` has under `key`: a string, or an object with a string as its `content`.

    Raises StartupError for anything else.
    """
    text = value.get("content") if isinstance(value, dict) else value
    if not isinstance(text, str):
        raise StartupError(f"`{file}`: `{key}` must be a string, or an object with `content`, not {value!r:.100}")
    return text


def _added_token(value: object, key: str, file: str, *, special: bool) -> AddedToken:
    """From its text, or from an object that says how it is matched."""
    text = token_text(value, key, file)
    if not isinstance(value, dict):
        return AddedToken(text, special=special, normalized=not special)
    flags = {key: bool(value[key]) for key in ("single_word", "lstrip", "rstrip", "normalized") if key in value}
    return AddedToken(text, special=special or bool(value.get("special")), **flags)


_Converter = Callable[[Path, _TokenizerConfig], Tokenizer]


def _converter(name: str, folder: Path) -> _Converter | None:
    if name in WORD_PIECE_CLASSES and (folder / "vocab.txt").is_file():
        return _word_piece
    if name in ROBERTA_CLASSES and (folder / "merges.txt").is_file():
        return _roberta
    return _gpt2 if name == "GPT2Tokenizer" and (folder / "merges.txt").is_file() else None


def _word_piece(folder: Path, config: _TokenizerConfig) -> Tokenizer:
    """BERT's: vocab.txt, one token a line."""
    lines = (folder / "vocab.txt").read_text(encoding="utf-8").removesuffix("\n").split("\n")
    vocabulary = {token: id for id, token in enumerate(lines)}
    unknown, first, last = (config.special(f"{key}_token", f"[{key.upper()}]") for key in ("unk", "cls", "sep"))
    for key in ("pad", "mask"):
        config.special(f"{key}_token", f"[{key.upper()}]")
    missing = [token for token in (unknown, first, last) if token not in vocabulary]
    if missing:
        raise StartupError(f"`{folder / 'vocab.txt'}` lacks the special tokens {', '.join(missing)}")
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token=unknown))
    tokenizer.normalizer = normalizers.BertNormalizer(
        handle_chinese_chars=config.flag("tokenize_chinese_chars", True),
        strip_accents=config.flag("strip_accents", None),
        lowercase=config.flag("do_lower_case", True),
    )
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{first} $A {last}",
        pair=f"{first} $A {last} $B:1 {last}:1",
        special_tokens=[(token, vocabulary[token]) for token in (first, last)],
    )
    return tokenizer


def _byte_level(folder: Path, config: _TokenizerConfig) -> Tokenizer:
    """Byte-pair encoding over bytes: vocab.json and merges.txt."""
    model = models.BPE.from_file(str(folder / "vocab.json"), str(folder / "merges.txt"))
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=config.flag("add_prefix_space", False))
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _roberta(folder: Path, config: _TokenizerConfig) -> Tokenizer:
    tokenizer = _byte_level(folder, config)
    names = {"bos": "<s>", "eos": "</s>", "unk": "<unk>", "sep": "</s>", "pad": "<pad>", "cls": "<s>", "mask": "<mask>"}
    special = {key: config.special(f"{key}_token", text) for key, text in names.items()}
    last, first = ((special[key], _id_of(tokenizer, special[key])) for key in ("sep", "cls"))
    options = config.flag("trim_offsets", True), config.flag("add_prefix_space", False)
    tokenizer.post_processor = processors.RobertaProcessing(last, first, *options)
    return tokenizer


def _gpt2(folder: Path, config: _TokenizerConfig) -> Tokenizer:
    tokenizer = _byte_level(folder, config)
    first, last = (config.special(f"{key}_token", END_OF_TEXT) for key in ("bos", "eos"))
    config.special("unk_token", END_OF_TEXT)
    before = f"{first} " if config.flag("add_bos_token", False) else ""
    after = f" {last}" if config.flag("add_eos_token", False) else ""
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{before}$A{after}",
        pair=f"{before}$A{after} {before and f'{first}:1 '}$B:1{after and f'{after}:1'}",
        special_tokens=[(token, _id_of(tokenizer, token)) for token in {first, last} if before or after],
    )
    return tokenizer


def _id_of(tokenizer: Tokenizer, token: str) -> int:
    id = tokenizer.token_to_id(token)
    if id is None:
        raise StartupError(f"the vocabulary lacks the special token {token!r}")
    return id


def _convert_by_transformers(folder: Path, vocabulary: Path) -> Tokenizer:
    try:
        import sentencepiece  # noqa: F401 - transformers reads its models with it
        import transformers
    except ImportError as error:
        raise StartupError(
            f"`{TOKENIZER}` not found in `{folder}`; to make it of `{vocabulary.name}` at every start: "
            "pip install 'tei-grpc[generic]'; to make it once, elsewhere: "
            "`transformers.AutoTokenizer.from_pretrained(folder).save_pretrained(folder)`"
        ) from error
    with library_errors(
        f"`{TOKENIZER}` not found in `{folder}`, and transformers {transformers.__version__} cannot make it of "
        f"`{vocabulary.name}`"
    ):
        made: Any = transformers.AutoTokenizer.from_pretrained(  # nosec B615 # nothing is downloaded
            folder, local_files_only=True, trust_remote_code=False
        )
        return Tokenizer.from_str(made.backend_tokenizer.to_str())


def is_gte_qwen2(hf_config: Mapping[str, Any]) -> bool:
    """The publisher's code, which is never run, puts <|endoftext|> after every text; tokenizer.json does not say so."""
    code = hf_config.get("auto_map")
    return hf_config.get("model_type") == "qwen2" and isinstance(code, dict) and code.get("AutoModel") == GTE_QWEN2


def _end_with(tokenizer: Tokenizer, token: str) -> None:
    """Have every text end in `token`. Raises StartupError where the tokenizer already adds something else."""
    id = _id_of(tokenizer, token)
    if tokenizer.encode("a").ids[-1:] == [id]:
        return
    if tokenizer.num_special_tokens_to_add(False):
        raise StartupError(f"every text of this model must end in {token}, but `{TOKENIZER}` adds other tokens")
    ending = processors.TemplateProcessing(f"$A {token}", f"$A {token} $B:1 {token}:1", [(token, id)])
    before = tokenizer.post_processor
    tokenizer.post_processor = ending if before is None else processors.Sequence([before, ending])
