"""The sentence-transformers files of a checkpoint, in the dialects of versions up to 5 and from 5.4 on."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from tei_grpc.errors import StartupError
from tei_grpc.loading.files import check_inside, read_object, read_optional_object, read_optional_objects, read_value
from tei_grpc.loading.tokenizer_files import TOKENIZER_CONFIG
from tei_grpc.types import Pooling

LIMIT_FILES = tuple(
    f"sentence_{name}_config.json"
    for name in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)

PROMPTS = "config_sentence_transformers.json"

POOLING_FLAGS = {  # up to version 5; also the order in which several are concatenated
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
POOLING_MODES = {
    "cls": Pooling.CLS,
    "max": Pooling.MAX,
    "mean": Pooling.MEAN,
    "mean_sqrt_len_tokens": Pooling.MEAN_SQRT_LEN,
    "weightedmean": Pooling.WEIGHTED_MEAN,
    "lasttoken": Pooling.LAST_TOKEN,
}

ENCODERS = ("Transformer", "MLMTransformer")
AFTER_POOLING = ("Dense", "LayerNorm")
LOGIT_SCORE = "LogitScore"  # a language model's logits of one or two tokens become the score of a pair
OUTPUT, SCORES = "module_output_name", "scores"  # of a Dense module that makes a CrossEncoder of an encoder
OF_THE_FAMILY = ("FlexibleQuantizer",)  # pplx-embed's rounding: the model does it
WITHOUT_EFFECT = ("Normalize", "Dropout")  # each request decides on normalization; dropout is for training
KNOWN = (*ENCODERS, "Pooling", "SpladePooling", LOGIT_SCORE, *AFTER_POOLING, *OF_THE_FAMILY, *WITHOUT_EFFECT)


@dataclass(frozen=True, slots=True)
class Module:
    """A module that runs on pooled vectors: `type` is "Dense" or "LayerNorm"."""

    type: str
    folder: Path
    config: Mapping[str, Any]


class ScoreTokens(NamedTuple):
    """A pair's score is the logit of `true`, less that of `false` where there is one."""

    true: int
    false: int | None


@dataclass(frozen=True, slots=True)
class Description:
    """What the files say; None, or nothing, where they are silent."""

    pooling: tuple[Pooling, ...] = ()  # several are concatenated
    include_prompt: bool = True
    modules: tuple[Module, ...] = ()
    max_seq_length: int | None = None
    model_max_length: int | None = None  # the tokenizer's
    lower_case: bool = False
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt_name: str | None = None
    score_tokens: ScoreTokens | None = None
    scores: int | None = None  # labels of an encoder that is a CrossEncoder by its last Dense module
    takes_messages: bool = True  # pairs go through the chat template, where it has a place for them
    template_variables: Mapping[str, Any] = field(default_factory=dict)


def read(folder: Path) -> Description:
    """All of it. Raises StartupError for a file that cannot be read, and for a module that is not supported."""
    modules = [(_name(module), module) for module in read_optional_objects(folder / "modules.json")]
    for name, module in modules:
        _check_known(name, module)
    pooling = read_optional_object(_pooling_folder(folder, modules) / "config.json")
    limits_file, limits = _read_limits(folder)
    tokenizer = read_optional_object(folder / TOKENIZER_CONFIG)
    prompts = read_optional_object(folder / PROMPTS)
    after = tuple(_read_module(name, folder / module["path"]) for name, module in modules if name in AFTER_POOLING)
    return Description(
        pooling=(Pooling.SPLADE,) if any(name == "SpladePooling" for name, _ in modules) else read_pooling(pooling),
        include_prompt=bool(pooling.get("include_prompt", True)),
        modules=after,
        max_seq_length=_positive(read_value(limits, "max_seq_length", float, limits_file)),
        model_max_length=_positive(read_value(tokenizer, "model_max_length", float, TOKENIZER_CONFIG)),
        lower_case=bool(limits.get("do_lower_case", False)),
        prompts=_read_prompts(prompts),
        default_prompt_name=read_value(prompts, "default_prompt_name", str, PROMPTS),
        score_tokens=next((_read_score_tokens(folder / m["path"]) for name, m in modules if name == LOGIT_SCORE), None),
        scores=_read_scores(after),
        takes_messages="message" in (read_value(limits, "modality_config", dict, limits_file) or ("message",)),
        template_variables=_read_template_variables(limits, limits_file),
    )


def read_pooling(config: Mapping[str, Any]) -> tuple[Pooling, ...]:
    """The modes that a pooling config names; absent flags are off; none for an empty config. Raises StartupError."""
    if not config:
        return ()
    modes = config.get("pooling_mode") or [mode for flag, mode in POOLING_FLAGS.items() if config.get(flag)] or ["mean"]
    modes = modes if isinstance(modes, list) else [modes]
    unknown = [mode for mode in modes if str(mode) not in POOLING_MODES]
    if unknown:
        raise StartupError(f"pooling mode {unknown} is not supported; choose one with `--pooling`")
    return tuple(POOLING_MODES[mode] for mode in modes)


def replace_dense(modules: Sequence[Module], folder: Path) -> tuple[Module, ...]:
    """The modules with the Dense module in `folder` in the place of theirs, or after them where they have none.

    Raises StartupError when they have several, and when there is none in `folder`.
    """
    config = read_object(folder / "config.json")
    own = [module for module in modules if module.type == "Dense"]
    if len(own) > 1:
        names = ", ".join(module.folder.name for module in own)
        raise StartupError(f"`--dense-path` can replace one Dense module, but this model has several: {names}")
    dense = Module("Dense", folder, config)
    return tuple(dense if module in own else module for module in modules) if own else (*modules, dense)


def _read_limits(folder: Path) -> tuple[str, Mapping[str, Any]]:
    """The first of the files with any content, and what is in it."""
    found = ((file, read_optional_object(folder / file)) for file in LIMIT_FILES)
    return next(((file, limits) for file, limits in found if limits), (LIMIT_FILES[0], {}))


def _read_template_variables(limits: Mapping[str, Any], file: str) -> Mapping[str, Any]:
    options = read_value(limits, "processing_kwargs", dict, file) or {}
    return read_value(options, "chat_template", dict, file) or {}


def _read_scores(modules: Sequence[Module]) -> int | None:
    scoring = [module for module in modules if module.config.get(OUTPUT) == SCORES]
    if not scoring:
        return None
    return read_value(scoring[0].config, "out_features", int, f"{scoring[0].folder.name}/config.json")


def _read_score_tokens(folder: Path) -> ScoreTokens:
    config = read_optional_object(folder / "config.json")
    true = read_value(config, "true_token_id", int, f"{folder.name}/config.json")
    if true is None:
        raise StartupError(f"`{folder.name}/config.json`: `true_token_id` is missing")
    return ScoreTokens(true, read_value(config, "false_token_id", int, f"{folder.name}/config.json"))


def _read_prompts(config: Mapping[str, Any]) -> Mapping[str, str]:
    prompts = read_value(config, "prompts", dict, PROMPTS) or {}
    if not all(isinstance(text, str) for text in prompts.values()):
        raise StartupError(f"`{PROMPTS}`: `prompts` must map names to strings, not {prompts!r:.100}")
    return prompts


def _pooling_folder(folder: Path, modules: Sequence[tuple[str, Mapping[str, Any]]]) -> Path:
    return folder / next((module["path"] for name, module in modules if name == "Pooling"), "1_Pooling")


def _name(module: Mapping[str, Any]) -> str:
    return str(module.get("type", "")).rpartition(".")[2]


def _check_known(name: str, module: Mapping[str, Any]) -> None:
    if not isinstance(module.get("path"), str):
        raise StartupError(f"`modules.json`: `{module.get('type')}` has no `path`")
    check_inside(module["path"], "modules.json")
    if name not in KNOWN:
        raise StartupError(f"`modules.json` lists `{module.get('type')}`, a module that is not supported")


def _read_module(name: str, folder: Path) -> Module:
    return Module(name, folder, read_optional_object(folder / "config.json"))


def _positive(number: float | None) -> int | None:
    """Tokenizers write 1e30 for "no limit": that, like null, says nothing."""
    return int(number) if number is not None and 1 <= number < 10**9 else None
