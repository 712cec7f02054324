"""The chat template by which a language model judges a query and a document, as the text around the two."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from tei_grpc.errors import StartupError
from tei_grpc.loading.failures import library_errors
from tei_grpc.loading.files import read_optional_object, read_value
from tei_grpc.loading.tokenizer_files import TOKENIZER_CONFIG, token_text

QWEN3_RERANKER = "qwen3-reranker"  # a template that its checkpoints document without stating it
QWEN3_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
ROLES = ("query", "document")
MARK = "\ue000"  # of the private use area: in no template and no vocabulary
FILE = "chat_template.jinja"
NOT_FOR_JINJA = ("restore_suffix", "padding", "truncation", "max_length", "return_tensors")


@dataclass(frozen=True, slots=True)
class PairTemplate:
    """prefix + query + infix + document + suffix."""

    prefix: str
    infix: str
    suffix: str
    strips: bool = False  # query and document lose the white space at their ends

    def fill(self, query: str, document: str) -> tuple[str, int, int]:
        """The whole text, and where in it the document starts and stops, in characters."""
        if self.strips:
            query, document = query.strip(), document.strip()
        start = len(self.prefix) + len(query) + len(self.infix)
        text = self.prefix + query + self.infix + document + self.suffix
        return text, start, start + len(document)


def qwen3_reranker(instruction: str | None) -> PairTemplate:
    """The template on the model card of Qwen3-Reranker, https://huggingface.co/Qwen/Qwen3-Reranker-0.6B."""
    return PairTemplate(
        "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
        'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
        f"<Instruct>: {instruction or QWEN3_INSTRUCTION}\n<Query>: ",
        "\n<Document>: ",
        "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n",
    )


def read_source(folder: Path) -> str | None:
    """The Jinja text of a checkpoint's chat template: chat_template.jinja, else what the tokenizer's config holds.

    Of several in that config, it is the one called `default`. Raises StartupError.
    """
    if (folder / FILE).is_file():
        return _read(folder / FILE)
    config = read_optional_object(folder / TOKENIZER_CONFIG)
    stated = config.get("chat_template")
    if not isinstance(stated, list):
        return read_value(config, "chat_template", str, TOKENIZER_CONFIG)
    if not all(isinstance(named, dict) for named in stated):
        raise StartupError(f"`{TOKENIZER_CONFIG}`: `chat_template` must be a list of objects, not {stated!r:.100}")
    default: Mapping[str, Any] = next((named for named in stated if named.get("name") == "default"), {})
    return read_value(default, "template", str, TOKENIZER_CONFIG)


def choose_template(choice: str, folder: Path, instruction: str | None, variables: Mapping[str, Any]) -> PairTemplate:
    """What `--chat-template` names. Raises StartupError when it has no place for a query and a document."""
    if choice == QWEN3_RERANKER:
        return qwen3_reranker(instruction)
    template = split(_read(Path(choice)), folder, instruction, variables)
    if template is None:
        raise StartupError(f"`--chat-template` `{choice}` has no place for a `query` and a `document`")
    return template


def split(source: str, folder: Path, instruction: str | None, variables: Mapping[str, Any]) -> PairTemplate | None:
    """The text around a query and a document, None when a template loses one of them.

    As in sentence-transformers, they are messages of the roles `query` and `document`, after one of the role `system`
    if there is an instruction. Content is plain text or a list of parts, whichever the template understands.
    """
    render = _compile(source, {**_special_tokens(folder), **variables})
    for content in (_plain, _parts):
        system = [{"role": "system", "content": content(instruction)}] if instruction else []
        for padding in (" ", ""):
            marks = [f"{padding}{MARK}{role}{MARK}{padding}" for role in ROLES]
            pair = [{"role": role, "content": content(mark)} for role, mark in zip(ROLES, marks, strict=True)]
            text = render(system + pair)
            if [text.count(mark) for mark in marks] == [1, 1] and text.index(marks[0]) < text.index(marks[1]):
                prefix, _, rest = text.partition(marks[0])
                infix, _, suffix = rest.partition(marks[1])
                return PairTemplate(prefix, infix, suffix, strips=not padding)
    return None


def _plain(text: str) -> object:
    return text


def _parts(text: str) -> object:
    return [{"type": "text", "text": text}]


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise StartupError(f"chat template `{file}` cannot be read: {error}") from error


def _compile(source: str, variables: Mapping[str, Any]) -> partial[str]:
    """The template in Jinja's sandbox, with the settings that templates are written for."""
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.globals["raise_exception"] = _give_up
    with library_errors("the chat template is no Jinja template"):  # more than its own errors: Python compiles, too
        return partial(_render, environment.from_string(source), variables)


def _render(template: Any, variables: Mapping[str, Any], messages: Sequence[Mapping[str, object]]) -> str:
    """The text; empty where the template cannot do with these messages."""
    options = {name: value for name, value in variables.items() if name not in NOT_FOR_JINJA}
    try:
        return str(template.render(**{"add_generation_prompt": False, **options}, messages=messages))
    except Exception:  # a template may do anything with messages that it was not written for
        return ""


def _give_up(message: str) -> NoReturn:
    raise ValueError(message)


def _special_tokens(folder: Path) -> dict[str, str]:
    config = read_optional_object(folder / TOKENIZER_CONFIG)
    tokens = {
        name: value for name, value in config.items() if name.endswith("_token") and isinstance(value, str | dict)
    }
    return {name: token_text(value, name, TOKENIZER_CONFIG) for name, value in tokens.items()}
