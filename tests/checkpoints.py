"""Makes tiny checkpoints with random weights, as transformers and sentence-transformers would save them.

One row per checkpoint. Every bias and every norm is random too: with transformers' own zeros and ones, a missing bias
or two swapped norms would not show.
"""

import json
import string
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

BERT_SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
ROBERTA_SPECIAL = ("<s>", "<pad>", "</s>", "<unk>", "<mask>")
WORDS = ("hello", "world", "北", "京", "😀", "cafe", "café", "é", "##é", "שלום", "query")
CHARACTERS = (*string.ascii_lowercase, *string.digits)
PIECES = (*CHARACTERS, *".,!?:", *(f"##{character}" for character in CHARACTERS), *WORDS)


@dataclass(frozen=True)
class Row:
    """How one checkpoint is made: a model class of transformers, its config, and what sentence-transformers adds."""

    model: str
    config: Mapping[str, Any] = field(default_factory=dict)
    pooling: str | None = None  # "mean", "cls" or "lasttoken": written to 1_Pooling
    special: tuple[str, ...] = BERT_SPECIAL
    gain: float = 1.0  # on weight matrices; without a norm on the residual, 1 would amplify every rounding
    norm: float = 1.0  # about which the weights of norms lie


SIZES = {
    "vocab_size": len(BERT_SPECIAL) + len(PIECES),
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 132,
}
ROBERTA = {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "type_vocab_size": 1, "layer_norm_eps": 1e-5}
SHORT = {"max_position_embeddings": 40}
ONE_LABEL = {"id2label": {0: "LABEL_0"}, "label2id": {"LABEL_0": 0}}
THREE_LABELS = {
    "id2label": {0: "negative", 1: "neutral", 2: "positive"},
    "label2id": {"negative": 0, "neutral": 1, "positive": 2},
}

SLIDING_THEN_FULL = ["sliding_attention", "full_attention", "full_attention", "sliding_attention"]
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN_ROPE = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 8.25, "original_max_position_embeddings": 16}
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 500.0, "factor": 2.0}
DYNAMIC_ROPE = {"rope_type": "dynamic", "rope_theta": 500.0, "factor": 2.0}
WINDOW_ON_UPPER_LAYERS = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}


def _roberta(model: str, pooling: str | None = None, **config: Any) -> Row:
    return Row(model, {**ROBERTA, **config}, pooling, ROBERTA_SPECIAL)


def _deberta(model: str, pooling: str | None = None, **config: Any) -> Row:
    """As v3 has it, but with so few buckets that short texts reach the logarithmic ones."""
    relative = {"relative_attention": True, "position_buckets": 8, "norm_rel_ebd": "layer_norm"}
    shared = {"pos_att_type": ["p2c", "c2p"], "share_att_key": True, "position_biased_input": False}
    return Row(model, {**relative, **shared, **config}, pooling)


def _distilbert(model: str, pooling: str | None = None, **config: Any) -> Row:
    return Row(model, {"hidden_dim": 48, **config}, pooling)


def _gte(model: str, pooling: str | None = None, **config: Any) -> Row:
    return Row(model, {"type_vocab_size": 1, "pad_token_id": 1, **config}, pooling)


def _modernbert(model: str, pooling: str | None = None, **config: Any) -> Row:
    """Four layers, of which the first and the last look at all tokens, the others at four on either side."""
    ids = {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "cls_token_id": 0, "sep_token_id": 2}
    return Row(
        model, {"num_hidden_layers": 4, "local_attention": 8, **ids, **config}, pooling, ROBERTA_SPECIAL, gain=0.7
    )


def _decoder(model: str, pooling: str | None = None, **config: Any) -> Row:
    return Row(
        model, {"num_hidden_layers": 3, "num_key_value_heads": 2, "pad_token_id": 0, **config}, pooling, gain=0.5
    )


def _qwen3(model: str, pooling: str | None = None, **config: Any) -> Row:
    return _decoder(model, pooling, head_dim=16, **config)


def _gemma(model: str, pooling: str | None = None, **config: Any) -> Row:
    """Seven layers, of which the sixth looks at all tokens."""
    sizes = {"num_hidden_layers": 7, "head_dim": 16, "query_pre_attn_scalar": 24, "sliding_window": 8}
    return replace(_decoder(model, pooling, **sizes, **config), norm=0.0)


def _eurobert(model: str, pooling: str | None = None, **config: Any) -> Row:
    return _decoder(model, pooling, mask_token_id=4, **config)


ROWS: dict[str, Row] = {
    "bert-mean": Row("BertModel", {}, "mean"),
    "bert-cls": Row("BertModel", {"hidden_act": "gelu_new"}, "cls"),
    "bert-relu": Row("BertModel", {"hidden_act": "relu", "type_vocab_size": 1}, "lasttoken"),
    "bert-three-labels": Row("BertForSequenceClassification", THREE_LABELS),
    "bert-one-label": Row("BertForSequenceClassification", ONE_LABEL),
    "bert-masked-lm": Row("BertForMaskedLM"),
    "bert-masked-lm-untied": Row("BertForMaskedLM", {"tie_word_embeddings": False}),
    "bert-tokens": Row("BertForTokenClassification", THREE_LABELS, "mean"),
    "bert-answers": Row("BertForQuestionAnswering", {}, "mean"),
    "roberta": _roberta("RobertaModel", "mean"),
    "roberta-three-labels": _roberta("RobertaForSequenceClassification", **THREE_LABELS),
    "roberta-masked-lm": _roberta("RobertaForMaskedLM"),
    "xlm-roberta": _roberta("XLMRobertaModel", "cls"),
    "xlm-roberta-one-label": _roberta("XLMRobertaForSequenceClassification", **ONE_LABEL),
    "camembert": _roberta("CamembertModel", "mean"),
    "distilbert": _distilbert("DistilBertModel", "mean"),
    "distilbert-relu": _distilbert("DistilBertModel", "cls", activation="relu"),
    "distilbert-three-labels": _distilbert("DistilBertForSequenceClassification", **THREE_LABELS),
    "distilbert-masked-lm": _distilbert("DistilBertForMaskedLM"),
    "distilbert-masked-lm-untied": _distilbert("DistilBertForMaskedLM", tie_word_embeddings=False),
    "distilbert-tokens": _distilbert("DistilBertForTokenClassification", "mean", **THREE_LABELS),
    "distilbert-answers": _distilbert("DistilBertForQuestionAnswering", "mean"),
    "mpnet": _roberta("MPNetModel", "mean"),
    "mpnet-one-label": _roberta("MPNetForSequenceClassification", **ONE_LABEL),
    "mpnet-masked-lm": _roberta("MPNetForMaskedLM"),
    "mpnet-tokens": _roberta("MPNetForTokenClassification", "mean", **THREE_LABELS),
    "deberta": _deberta("DebertaV2Model", "mean"),
    "deberta-apart": _deberta(
        "DebertaV2Model", "cls", share_att_key=False, type_vocab_size=2, position_biased_input=True, embedding_size=24
    ),
    "deberta-convolution": _deberta("DebertaV2Model", "mean", conv_kernel_size=3, conv_act="gelu", conv_groups=2),
    "deberta-content-to-position": _deberta("DebertaV2Model", "mean", pos_att_type="c2p", norm_rel_ebd="none"),
    "deberta-position-to-content": _deberta("DebertaV2Model", "mean", pos_att_type="p2c", share_att_key=False),
    "deberta-exact-positions": _deberta("DebertaV2Model", "mean", position_buckets=-1, max_relative_positions=6),
    "deberta-without-positions": _deberta("DebertaV2Model", "mean", relative_attention=False, norm_rel_ebd="none"),
    "deberta-three-labels": _deberta("DebertaV2ForSequenceClassification", **THREE_LABELS),
    "deberta-masked-lm": _deberta("DebertaV2ForMaskedLM", legacy=False),
    "deberta-legacy-masked-lm": _deberta("DebertaV2ForMaskedLM", embedding_size=24),
    "deberta-legacy-masked-lm-untied": _deberta("DebertaV2ForMaskedLM", tie_word_embeddings=False),
    "deberta-tokens": _deberta("DebertaV2ForTokenClassification", "mean", **THREE_LABELS),
    "modernbert": _modernbert("ModernBertModel", "cls"),
    "modernbert-biases": _modernbert(
        "ModernBertModel", "mean", attention_bias=True, mlp_bias=True, norm_bias=True, layer_types=SLIDING_THEN_FULL
    ),
    "modernbert-one-label": _modernbert("ModernBertForSequenceClassification", **ONE_LABEL),
    "modernbert-three-labels": _modernbert(
        "ModernBertForSequenceClassification", classifier_pooling="mean", classifier_bias=True, **THREE_LABELS
    ),
    "modernbert-masked-lm": _modernbert("ModernBertForMaskedLM"),
    "modernbert-tokens": _modernbert("ModernBertForTokenClassification", "mean", **THREE_LABELS),
    "nomic": Row("NomicBertModel", {}, "mean"),
    "nomic-three-labels": Row("NomicBertForSequenceClassification", THREE_LABELS),
    "nomic-masked-lm": Row("NomicBertForMaskedLM"),
    "nomic-tokens": Row("NomicBertForTokenClassification", THREE_LABELS, "mean"),
    "gte": _gte("GteModel", "cls"),
    "gte-without-types": Row("GteModel", {"type_vocab_size": 0, "hidden_act": "relu"}, "mean", gain=0.7),
    "gte-llama3-rope": _gte("GteModel", "cls", type_vocab_size=2, rope_parameters=LLAMA3_ROPE),
    "gte-one-label": _gte("GteForSequenceClassification", **ONE_LABEL),
    "gte-masked-lm": _gte("GteForMaskedLM"),
    "gte-masked-lm-untied": _gte("GteForMaskedLM", tie_word_embeddings=False),
    "gte-tokens": _gte("GteForTokenClassification", "cls", **THREE_LABELS),
    "jina-v3": _roberta("JinaEmbeddingsV3Model", "mean"),
    "jina-v3-yarn-rope": _roberta("JinaEmbeddingsV3Model", "mean", rope_parameters=YARN_ROPE),
    "jina-v3-three-labels": _roberta("JinaEmbeddingsV3ForSequenceClassification", **THREE_LABELS),
    "jina-v3-masked-lm": _roberta("JinaEmbeddingsV3ForMaskedLM"),
    "mistral": _decoder("MistralModel", "lasttoken", sliding_window=None, head_dim=12),
    "mistral-window": _decoder("MistralModel", "lasttoken", sliding_window=6),
    "mistral-bidirectional-window": _decoder("MistralModel", "mean", sliding_window=6, is_causal=False),
    "mistral-three-labels": _decoder("MistralForSequenceClassification", sliding_window=6, **THREE_LABELS),
    "llama": _decoder("LlamaModel", "mean", attention_bias=True, mlp_bias=True, rope_parameters=LLAMA3_ROPE),
    "llama-bidirectional": _decoder("LlamaModel", "mean", is_causal=False, rope_parameters=LINEAR_ROPE),
    "llama-dynamic-rope": _decoder("LlamaModel", "mean", rope_parameters=DYNAMIC_ROPE, max_position_embeddings=20),
    "llama-one-label": _decoder("LlamaForSequenceClassification", **ONE_LABEL),
    "llama-tokens": _decoder("LlamaForTokenClassification", "mean", **THREE_LABELS),
    "qwen2": _decoder("Qwen2Model", "lasttoken", rope_parameters=YARN_ROPE),
    "qwen2-window": _decoder("Qwen2Model", "lasttoken", **WINDOW_ON_UPPER_LAYERS),
    "qwen2-bidirectional-window": _decoder("Qwen2Model", "mean", is_causal=False, **WINDOW_ON_UPPER_LAYERS),
    "qwen2-three-labels": _decoder("Qwen2ForSequenceClassification", **THREE_LABELS),
    "qwen2-text-generation": _decoder("Qwen2ForCausalLM", "lasttoken"),
    "qwen3": _qwen3("Qwen3Model", "lasttoken"),
    "qwen3-biases": _qwen3("Qwen3Model", "lasttoken", attention_bias=True, **WINDOW_ON_UPPER_LAYERS),
    "qwen3-bidirectional": _qwen3("Qwen3Model", "mean", is_causal=False),
    "qwen3-one-label": _qwen3("Qwen3ForSequenceClassification", **ONE_LABEL),
    "gemma3": _gemma("Gemma3TextModel", "mean", use_bidirectional_attention=True),
    "gemma3-causal": _gemma("Gemma3TextModel", "lasttoken", attention_bias=True),
    "gemma3-one-label": _gemma("Gemma3TextForSequenceClassification", **ONE_LABEL),
    "eurobert": _eurobert("EuroBertModel", "mean", attention_bias=True, mlp_bias=True),
    "eurobert-three-labels": _eurobert("EuroBertForSequenceClassification", **THREE_LABELS),
    "eurobert-mean-one-label": _eurobert("EuroBertForSequenceClassification", classifier_pooling="mean", **ONE_LABEL),
    "eurobert-bos-one-label": _eurobert("EuroBertForSequenceClassification", classifier_pooling="bos", **ONE_LABEL),
    "eurobert-masked-lm": _eurobert("EuroBertForMaskedLM", mlp_bias=True),
    "eurobert-masked-lm-tied": _eurobert("EuroBertForMaskedLM", tie_word_embeddings=True),
    "eurobert-tokens": _eurobert("EuroBertForTokenClassification", "mean", **THREE_LABELS),
    # the fixtures of the end-to-end cases: a short position table, so that limits are cheap to reach
    "bert-t": Row("BertModel", SHORT, "mean"),
    "rob-t": _roberta("RobertaModel", "mean", max_position_embeddings=42),
    "ce-t": Row("BertForSequenceClassification", {**SHORT, **ONE_LABEL}),
    "clf-t": Row("BertForSequenceClassification", {**SHORT, **THREE_LABELS}),
    "mlm-t": Row("BertForMaskedLM", SHORT),
}


def make_checkpoint(name: str, folder: Path, *, seed: int = 0) -> Path:
    """Write the checkpoint of row `name` into `folder`, and return it."""
    import transformers

    row = ROWS[name]
    model_class = getattr(transformers, row.model)
    config = model_class.config_class(**{**SIZES, **row.config})
    model = model_class(config).eval()
    randomise(model, seed, gain=row.gain, norm=row.norm)
    model.tie_weights()
    model.save_pretrained(folder)
    write_tokenizer(folder, row.special, config.max_position_embeddings - (2 if row.special == ROBERTA_SPECIAL else 0))
    if row.pooling is not None:
        write_pooling(folder, row.pooling, config.hidden_size)
    return folder


def randomise(model: torch.nn.Module, seed: int, *, gain: float = 1.0, norm: float = 1.0) -> None:
    """Give every parameter random values of a size that keeps activations alive."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        values = torch.randn(parameter.shape, generator=generator)
        if parameter.dim() > 1:
            values *= 0.5 if "embed" in name else gain * (2 / parameter.shape[-1]) ** 0.5
        else:
            values = values * 0.1 + (0 if name.endswith("bias") else norm)
        parameter.data.copy_(values)


def make_tokenizer(special: tuple[str, ...] = BERT_SPECIAL) -> Tokenizer:
    """A WordPiece tokenizer over letters, digits and a few words, in BERT's manner or with RoBERTa's special tokens."""
    vocabulary = {piece: index for index, piece in enumerate((*special, *PIECES))}
    roberta = special == ROBERTA_SPECIAL
    first, last = ("<s>", "</s>") if roberta else ("[CLS]", "[SEP]")
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="<unk>" if roberta else "[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.add_special_tokens(list(special))
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{first} $A {last}",
        pair=f"{first} $A {last} {last} $B {last}" if roberta else f"{first} $A {last} $B:1 {last}:1",
        special_tokens=[(token, vocabulary[token]) for token in (first, last)],
    )
    return tokenizer


def write_tokenizer(folder: Path, special: tuple[str, ...], max_length: int) -> None:
    """tokenizer.json and tokenizer_config.json."""
    names = ("cls_token", "pad_token", "sep_token", "unk_token", "mask_token")
    if special == BERT_SPECIAL:
        names = ("pad_token", "unk_token", "cls_token", "sep_token", "mask_token")
    config = dict(zip(names, special, strict=True))
    make_tokenizer(special).save(str(folder / "tokenizer.json"))
    config |= {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": max_length}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def write_pooling(folder: Path, mode: str, hidden: int) -> None:
    """modules.json and 1_Pooling, in the dialect that every sentence-transformers release reads."""
    flags = {"cls": "cls_token", "mean": "mean_tokens", "lasttoken": "lasttoken"}
    pooling = {"word_embedding_dimension": hidden}
    pooling |= {f"pooling_mode_{flag}": flag == flags[mode] for flag in flags.values()}
    modules = [("Transformer", ""), ("Pooling", "1_Pooling"), ("Normalize", "2_Normalize")]
    listed = [
        {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for index, (kind, path) in enumerate(modules)
    ]
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    (folder / "modules.json").write_text(json.dumps(listed))


def bert_t(folder: Path) -> Path:
    """BERT, 2 layers, 40 positions, mean pooling."""
    return make_checkpoint("bert-t", folder)


def rob_t(folder: Path) -> Path:
    """RoBERTa, 42 positions, so 40 tokens."""
    return make_checkpoint("rob-t", folder)


def ce_t(folder: Path) -> Path:
    """A reranker: BERT with one logit."""
    return make_checkpoint("ce-t", folder)


def clf_t(folder: Path) -> Path:
    """A classifier: BERT with three labels."""
    return make_checkpoint("clf-t", folder)


def mlm_t(folder: Path) -> Path:
    """BERT with a masked-language-modelling head whose decoder is tied; for SPLADE."""
    return make_checkpoint("mlm-t", folder)
