"""The text around a query and a document is what transformers' own rendering puts there."""

from pathlib import Path

import pytest
import transformers

from tei_grpc.errors import StartupError
from tei_grpc.loading.chat_template import choose_template, read_source, split
from tests.folders import write_json
from tests.language_models import ROLES_TEMPLATE, make_tokenizer

STRUCTURED = (
    "{% for m in messages %}{% if m.role == 'query' %}Q: {{ m.content[0].text }}\n"
    "{% elif m.role == 'document' %}D: {{ m.content[0].text }}</s>{% endif %}{% endfor %}"
)
STRIPPING = "{% for m in messages %}{{ m.role }}: {{ m.content | trim }}\n{% endfor %}{{ eos_token }}"
GENERATING = "{% for m in messages %}[{{ m.content }}]{% endfor %}{% if add_generation_prompt %}answer:{% endif %}"
CONVERSATION = "{% for m in messages if m.role in ('user', 'assistant') %}{{ m.content }}{% endfor %}"
REFUSING = "{% if messages[0].role != 'user' %}{{ raise_exception('users first') }}{% endif %}{{ messages }}"
PAIR = ("a query", " a document\n")


def rendered(template: str, *, parts: bool = False, **variables: object) -> str:
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=make_tokenizer(), eos_token="<|im_end|>")
    contents = [[{"type": "text", "text": text}] if parts else text for text in PAIR]
    messages = [
        {"role": role, "content": content} for role, content in zip(("query", "document"), contents, strict=True)
    ]
    return tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False, **variables)


@pytest.mark.parametrize(
    ("template", "parts", "variables"),
    [
        (ROLES_TEMPLATE, False, {}),
        (STRUCTURED, True, {}),
        (STRIPPING, False, {}),
        (GENERATING, False, {}),
        (GENERATING, False, {"add_generation_prompt": True}),
    ],
)
def test_filled_template_is_what_transformers_renders(
    tmp_path: Path, template: str, *, parts: bool, variables: dict[str, object]
) -> None:
    write_json(tmp_path / "tokenizer_config.json", {"eos_token": {"content": "<|im_end|>"}})
    found = split(template, tmp_path, None, variables)
    assert found is not None
    text, start, stop = found.fill(*PAIR)
    assert text == rendered(template, parts=parts, **variables)
    assert text[start:stop].strip() == "a document"


@pytest.mark.parametrize("template", [CONVERSATION, REFUSING, "no place at all"])
def test_template_that_loses_a_role_is_none_for_pairs(tmp_path: Path, template: str) -> None:
    assert split(template, tmp_path, None, {}) is None


def test_instruction_is_a_system_message(tmp_path: Path) -> None:
    found = split(ROLES_TEMPLATE, tmp_path, "Find code", {})
    assert found is not None
    assert "<Instruct>: Find code\n" in found.prefix


def test_file_beside_the_tokenizer_wins_over_its_config(tmp_path: Path) -> None:
    write_json(tmp_path / "tokenizer_config.json", {"chat_template": "of the config"})
    assert read_source(tmp_path) == "of the config"
    (tmp_path / "chat_template.jinja").write_text("of the file")
    assert read_source(tmp_path) == "of the file"


def test_default_is_taken_of_several_templates(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "of tools"}, {"name": "default", "template": "of all"}]
    write_json(tmp_path / "tokenizer_config.json", {"chat_template": named})
    assert read_source(tmp_path) == "of all"


def test_checkpoint_without_a_template_has_none(tmp_path: Path) -> None:
    assert read_source(tmp_path) is None


@pytest.mark.parametrize(
    ("source", "reason"),
    [(CONVERSATION, "has no place"), ("{% if %}", "is no Jinja template"), (None, "cannot be read")],
)
def test_template_of_the_option_that_cannot_be_used_is_refused(tmp_path: Path, source: str | None, reason: str) -> None:
    file = tmp_path / "judge.jinja"
    if source is not None:
        file.write_text(source)
    with pytest.raises(StartupError, match=reason):
        choose_template(str(file), tmp_path, None, {})


def test_template_cannot_reach_python(tmp_path: Path) -> None:
    reaching = "{{ ''.__class__.__mro__[1].__subclasses__() }}{% for m in messages %}{{ m.content }}{% endfor %}"
    assert split(reaching, tmp_path, None, {}) is None
