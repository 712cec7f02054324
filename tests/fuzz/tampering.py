"""What can be done to a file of a checkpoint, as hypothesis draws it: to its JSON, to its header, to its bytes."""

import json
from collections.abc import Sequence
from copy import deepcopy
from typing import Any, NamedTuple

from hypothesis import strategies as st

from tests.fuzz.bytes import Edit, damage, edits

HEADER_BYTES = 8  # a safetensors file begins with the length of its header

WORDS = (
    *("bert", "qwen3", "modernbert", "deberta-v2", "xlm-roberta", "albert", "no-such-model", "qwen2", "gelu", "tanh"),
    *("yarn", "dynamic", "llama3", "linear", "default", "max", "lasttoken", "scores", "multi_label_classification"),
    *("BertForMaskedLM", "BertForSequenceClassification", "Qwen3ForCausalLM", "BertTokenizer", "GPT2Tokenizer"),
    *(f"sentence_transformers.models.{name}" for name in ("Dense", "Pooling", "LayerNorm", "LogitScore", "CNN")),
    *("1_Pooling", "2_Dense", "..", "/", "x\0y", "[CLS]", "[MASK]", "\ud800", "{{ 1/0 }}", "", "x" * 10_000),
    *("BPE", "Unigram", "WordLevel", "WordPiece", "Sequence", "Precompiled", "Replace", "Split", "Metaspace", "Strip"),
    *("F32", "F64", "I64", "BOOL", "F8_E4M3", "(", "(a+)+$"),
)
KEYS = (
    *("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "max_position_embeddings", "rope_theta"),
    *("rope_scaling", "rope_parameters", "layer_types", "sliding_window", "auto_map", "id2label", "num_labels"),
    *("architectures", "torch_dtype", "pooling", "true_token_id", "prompts", "chat_template", "added_tokens_decoder"),
)
NUMBERS = (0, 1, -1, 2, 3, 7, 2**20, 2**31, -(2**31), 2**32, 2**45, 2**60, -(2**63), 2**64, 10**30)
FLOATS = (1e30, 0.5, -0.0, float("nan"), float("inf"), 1e308)
OTHERS = (None, True, False, [], {}, [[]], [None], [1, "x"], {"": None}, {"x": {}}, [[[[[[]]]]]])

VALUES = st.one_of(
    st.sampled_from(NUMBERS),
    st.sampled_from(FLOATS),
    st.sampled_from(WORDS),
    st.sampled_from(OTHERS),
    st.integers(),
    st.text(max_size=10),
)


class Change(NamedTuple):
    """What happens to one place of a JSON file. `steps` lead to it: the n-th child, modulo how many there are."""

    steps: Sequence[int]
    deed: str
    value: Any


class Tampering(NamedTuple):
    """What happens to one file of one checkpoint, in this order."""

    base: int  # which checkpoint, and which of its files: modulo how many there are
    file: int
    changes: Sequence[Change]  # of its JSON, or of a safetensors file's header
    length: int | None  # that a safetensors file claims for its header; None: what it is
    edits: list[Edit]


DEEDS = ("set", "set", "set", "set", "remove", "rename", "repeat", "add")
CHANGES = st.builds(
    Change,
    steps=st.lists(st.integers(0, 63), min_size=1, max_size=5),
    deed=st.sampled_from(DEEDS),
    value=VALUES,
)
LENGTHS = st.none() | st.sampled_from((0, 1, 7, 2**31, 2**60, 2**64 - 1))
TAMPERINGS = st.builds(
    Tampering,
    base=st.integers(0, 63),
    file=st.integers(0, 63),
    changes=st.lists(CHANGES, max_size=3),
    length=LENGTHS,
    edits=st.just([]) | edits,
)


def tamper(name: str, raw: bytes, tampering: Tampering) -> bytes:
    """The file `name`, which holds `raw`, after what is done to it."""
    if name.endswith(".json"):
        raw = _dump(change(json.loads(raw), tampering.changes))
    elif name.endswith(".safetensors"):
        size = HEADER_BYTES + int.from_bytes(raw[:HEADER_BYTES], "little")
        header = _dump(change(json.loads(raw[HEADER_BYTES:size]), tampering.changes))
        length = len(header) if tampering.length is None else tampering.length
        raw = length.to_bytes(HEADER_BYTES, "little") + header + raw[size:]
    return damage(raw, tampering.edits)


def change(tree: Any, changes: Sequence[Change]) -> Any:
    """`tree`, which is lost, after all changes."""
    for steps, deed, value in changes:
        holder, key, place = None, None, tree
        for step in steps:
            if not isinstance(place, list | dict) or not place:
                break
            holder = place
            key = list(place)[step % len(place)] if isinstance(place, dict) else step % len(place)
            place = holder[key]
        if holder is None:
            tree = deepcopy(value)
        else:
            _do(deed, holder, key, deepcopy(value))
    return tree


def _do(deed: str, holder: Any, key: Any, value: Any) -> None:
    if deed == "set":
        holder[key] = value
    elif deed == "remove":
        del holder[key]
    elif isinstance(holder, list):
        holder.insert(0, deepcopy(holder[key]))
    elif deed == "add":
        holder[KEYS[len(str(key)) % len(KEYS)]] = value
    else:
        holder[str(value)[:50]] = holder.pop(key) if deed == "rename" else deepcopy(holder[key])


def _dump(content: object) -> bytes:
    return json.dumps(content).encode()
