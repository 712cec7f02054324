"""Sound checkpoints to be tampered with: families, kinds and rotary embeddings, and every sort of file there can be."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.checkpoints import BERT_SPECIAL, bert_t, make_checkpoint, write_pooling, write_tokenizer
from tests.folders import write_json
from tests.language_models import make_reranker, read_tokenizer_config

WEIGHTS = "model.safetensors"
LIMIT = 30  # tokens

Make = Callable[[Path], Any]


def _row(name: str, folder: Path) -> None:
    make_checkpoint(name, folder)
    write_json(folder / "config_sentence_transformers.json", {"prompts": {"query": "query: "}})
    write_json(folder / "sentence_bert_config.json", {"max_seq_length": LIMIT, "do_lower_case": False})


def _generic(folder: Path) -> None:
    from tests.models.architectures import make_architecture

    make_architecture("albert", folder)


def _experts(folder: Path) -> None:
    from tests.models.formats import nomic_experts

    folder.mkdir(parents=True)
    nomic_experts(folder)
    write_tokenizer(folder, BERT_SPECIAL, LIMIT)
    write_pooling(folder, "mean", 32)


def _dense(folder: Path) -> None:
    bert_t(folder)
    kinds = {"": "Transformer", "1_Pooling": "Pooling", "2_Dense": "Dense", "3_LayerNorm": "LayerNorm"}
    modules = [{"path": path, "type": f"sentence_transformers.models.{kind}"} for path, kind in kinds.items()]
    write_json(folder / "modules.json", modules)
    sizes = {"in_features": 32, "out_features": 8, "bias": True}
    write_json(folder / "2_Dense/config.json", {**sizes, "activation_function": "torch.nn.modules.activation.Tanh"})
    save_file({"linear.weight": torch.ones(8, 32), "linear.bias": torch.ones(8)}, folder / "2_Dense" / WEIGHTS)
    write_json(folder / "3_LayerNorm/config.json", {"dimension": 8})
    save_file({"norm.weight": torch.ones(8), "norm.bias": torch.ones(8)}, folder / "3_LayerNorm" / WEIGHTS)


def _pickles(folder: Path) -> None:
    bert_t(folder)
    torch.save(load_file(folder / WEIGHTS), folder / "pytorch_model.bin")
    (folder / WEIGHTS).unlink()
    torch.save({"weight": torch.ones(1, 32), "bias": torch.ones(1)}, folder / "sparse_linear.pt")


def _shards(folder: Path) -> None:
    bert_t(folder)
    tensors = sorted(load_file(folder / WEIGHTS).items())
    (folder / WEIGHTS).unlink()
    shards = {"model-1.safetensors": dict(tensors[::2]), "model-2.safetensors": dict(tensors[1::2])}
    for name, part in shards.items():
        save_file(part, folder / name)
    weight_map = {tensor: name for name, part in shards.items() for tensor in part}
    write_json(folder / "model.safetensors.index.json", {"weight_map": weight_map})


def _vocabulary(folder: Path) -> None:
    """BERT's, and the special tokens in all places that older releases wrote them to."""
    bert_t(folder)
    vocabulary = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    (folder / "vocab.txt").write_text("\n".join(sorted(vocabulary, key=vocabulary.__getitem__)))
    (folder / "tokenizer.json").unlink()
    decoder = {"4": {"content": "[MASK]", "special": True, "lstrip": True}}
    write_json(
        folder / "tokenizer_config.json",
        {"tokenizer_class": "BertTokenizer", "do_lower_case": True, "added_tokens_decoder": decoder},
    )
    write_json(folder / "special_tokens_map.json", {"unk_token": {"content": "[UNK]"}, "cls_token": "[CLS]"})
    write_json(folder / "added_tokens.json", {"[MASK]": 4})


def _templates(folder: Path) -> None:
    """A reranker whose chat template is one of several, and has variables."""
    make_reranker(folder, "Qwen3ForCausalLM")
    template = (folder / "chat_template.jinja").read_text()
    (folder / "chat_template.jinja").unlink()
    named = [{"name": "rag", "template": ""}, {"name": "default", "template": template}]
    tokens = {"bos_token": {"content": "<|im_start|>"}, "add_bos_token": False}
    write_json(folder / "tokenizer_config.json", {**read_tokenizer_config(folder), **tokens, "chat_template": named})
    write_json(folder / "sentence_bert_config.json", {"processing_kwargs": {"chat_template": {"instruction": "x"}}})


def _adaptations(folder: Path) -> None:
    from tests.models.formats import TASKS, jina_v3_adapted

    folder.mkdir(parents=True)
    jina_v3_adapted(folder, task=TASKS[0])
    write_tokenizer(folder, BERT_SPECIAL, LIMIT)
    write_pooling(folder, "mean", 32)


def _scores(folder: Path) -> None:
    """An encoder that scores texts by its last module."""
    _dense(folder)
    config = json.loads((folder / "2_Dense/config.json").read_text())
    write_json(folder / "2_Dense/config.json", {**config, "module_output_name": "scores"})


def _lexical(folder: Path) -> None:
    bert_t(folder)
    torch.save({"weight": torch.ones(1, 32), "bias": torch.ones(1)}, folder / "sparse_linear.pt")
    tokens = {"cls_token": {"content": "[CLS]"}, "sep_token": "[SEP]", "model_max_length": LIMIT}
    write_json(folder / "tokenizer_config.json", tokens)


ROWS = ("bert-t", "ce-t", "mlm-t", "modernbert", "qwen3", "deberta", "gte-llama3-rope", "jina-v3-yarn-rope")
BASES: dict[str, Make] = {
    **{name: partial(_row, name) for name in ROWS},
    "generic": _generic,
    "experts": _experts,
    "dense": _dense,
    "pickles": _pickles,
    "shards": _shards,
    "vocabulary": _vocabulary,
    "language-model": lambda folder: make_reranker(folder, "Qwen3ForCausalLM"),
    "templates": _templates,
    "adaptations": _adaptations,
    "scores": _scores,
    "lexical": _lexical,
}
OPTIONS = {"mlm-t": {"pooling": "splade"}, "adaptations": {"lora_task": "retrieval.query"}}
