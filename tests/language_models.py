"""Makes tiny rerankers that are language models: byte-level BPE, a chat template, and what scores a pair."""

import json
from pathlib import Path
from typing import Any

import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tests.checkpoints import ONE_LABEL, randomise
from tests.folders import write_json

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MERGES = [("y", "e"), ("ye", "s"), ("n", "o"), ("Ġ", "h"), ("e", "r"), (">", ":"), ("Ċ", "Ċ"), ("Ġ", "w")]
LIMIT = 300  # tokens; the template alone takes most of a hundred words' bytes
ROLES_TEMPLATE = (
    "{%- set asked = messages | selectattr('role', 'eq', 'system') | map(attribute='content') | first | "
    "default('Find answers') -%}\n"
    "<|im_start|>system\nJudge.<|im_end|>\n<|im_start|>user\n<Instruct>: {{ asked }}\n"
    "<Query>: {{ messages | selectattr('role', 'eq', 'query') | map(attribute='content') | first }}\n"
    "<Document>: {{ messages | selectattr('role', 'eq', 'document') | map(attribute='content') | first }}<|im_end|>\n"
    "<|im_start|>assistant\n"
)
SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 48,
    "max_position_embeddings": 2048,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 0,
}


def make_tokenizer() -> Tokenizer:
    """Byte-level BPE with `yes` and `no`, and with pieces that begin with the space before a word."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = [*SPECIAL, *alphabet, *("".join(pair) for pair in MERGES)]
    tokenizer = Tokenizer(models.BPE({piece: index for index, piece in enumerate(pieces)}, MERGES))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    return tokenizer


def make_language_model(folder: Path, model: str, *, limit: int = LIMIT, **config: Any) -> Path:
    """A checkpoint of this class of transformers, with a tokenizer whose limit is `limit` tokens."""
    tokenizer = make_tokenizer()
    model_class = getattr(transformers, model)
    labels = ONE_LABEL if model.endswith("ForSequenceClassification") else {}
    built = model_class(
        model_class.config_class(vocab_size=tokenizer.get_vocab_size(), **{**SIZES, **labels, **config})
    )
    randomise(built.eval(), 0, gain=0.5, norm=0.0 if "Gemma" in model else 1.0)
    built.tie_weights()
    built.save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    tokens = {"pad_token": SPECIAL[0], "eos_token": SPECIAL[2], "model_max_length": limit}
    write_json(folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", **tokens})
    return folder


def make_reranker(folder: Path, model: str, *, template: str = ROLES_TEMPLATE, **config: Any) -> Path:
    """A reranker as sentence-transformers saves it since 5.4; a causal model answers by `yes` and `no`."""
    make_language_model(folder, model, **config)
    (folder / "chat_template.jinja").write_text(template)
    if model.endswith("ForCausalLM"):
        write_logit_score(folder)
    return folder


def write_logit_score(folder: Path, false: int | None = -1) -> None:
    """modules.json with a LogitScore of `yes` over `no`, or over another token, or of `yes` alone."""
    tokenizer = make_tokenizer()
    kinds = {"": "base.modules.transformer.Transformer", "1_LogitScore": "cross_encoder.modules.logit_score.LogitScore"}
    modules = [
        {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.{kind}"}
        for index, (path, kind) in enumerate(kinds.items())
    ]
    tokens = {"true_token_id": tokenizer.token_to_id("yes"), "false_token_id": false}
    if false == -1:
        tokens["false_token_id"] = tokenizer.token_to_id("no")
    write_json(folder / "modules.json", modules)
    write_json(folder / "1_LogitScore" / "config.json", tokens)
    logits = {"method": "forward", "method_output_name": "logits"}
    modality = {"text": logits, "message": {**logits, "format": "flat"}}
    described = {"transformer_task": "text-generation", "modality_config": modality}
    write_json(folder / "sentence_bert_config.json", {**described, "module_output_name": "causal_logits"})
    saved = {"model_type": "CrossEncoder", "prompts": {}, "default_prompt_name": None}
    write_json(folder / "config_sentence_transformers.json", saved)


def read_tokenizer_config(folder: Path) -> dict[str, Any]:
    """What `make_language_model` wrote."""
    return json.loads((folder / "tokenizer_config.json").read_text())
