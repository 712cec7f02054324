"""The other side: sentence-transformers where the checkpoint is one of its models, transformers otherwise.

Both read the checkpoint's folder only, never run code that comes with it, and compute in float32, one text at a time.
"""

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tei_grpc.commands.verify.answers import Answers, Question, Task
from tei_grpc.commands.verify.progress import Progress
from tei_grpc.errors import StartupError
from tei_grpc.loading.model_config import ModelConfig
from tei_grpc.loading.sentence_transformers import POOLING_MODES
from tei_grpc.types import Floats

LOCAL: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
FLOAT32 = {"dtype": torch.float32}

Ask = Callable[[str], Any]


def ask(folder: Path, model: ModelConfig, question: Question, progress: Progress) -> Answers:
    """Answer all texts. Raises StartupError when the library is missing or cannot load the checkpoint."""
    transformers, sentence_transformers = _import_libraries()
    try:
        side = _side(transformers, sentence_transformers, folder, model, question)
        values = []
        for text in question.texts:
            values.append(side.value(text))
            progress.step()
        token_ids = [side.token_ids(text) for text in question.texts]
    except Exception as error:  # these libraries raise whatever a checkpoint leads them to
        raise StartupError(f"the reference cannot run {folder}: {error}") from error
    return Answers(token_ids, values, "float32", side.about)


class Side:
    """A loaded reference."""

    def __init__(self, model: Any, ask: Ask, tokenizer: Any, prefix: str, about: dict[str, str]) -> None:
        self.about = about
        self._ask = ask
        self._stateful = [module for module in model.modules() if hasattr(module, "set_attention_type")]
        self._tokenizer = tokenizer
        self._prefix = prefix

    def value(self, text: str) -> Floats:
        """What the model says to a text, whatever came before: BigBird's attention stays changed after a short one."""
        for module in self._stateful:
            module.set_attention_type(module.config.attention_type)
        with torch.inference_mode():
            return np.asarray(self._ask(text), np.float32)

    def token_ids(self, text: str) -> list[int]:
        """Special tokens included, not truncated."""
        return list(self._tokenizer(self._prefix + text)["input_ids"])


def _import_libraries() -> tuple[Any, Any]:
    try:
        import sentence_transformers
        import transformers
    except ImportError as error:
        raise StartupError(f"verify needs {error.name}: pip install 'tei-grpc[verify]'") from error
    library: Any = transformers
    library.logging.set_verbosity_error()
    library.logging.disable_progress_bar()
    return library, sentence_transformers


def _side(transformers: Any, sentence_transformers: Any, folder: Path, model: ModelConfig, question: Question) -> Side:
    modules = (folder / "modules.json").is_file()
    if question.task is Task.EMBED:
        return _embedder(sentence_transformers, folder, model, question)
    if modules and question.task is Task.EMBED_SPARSE:
        return _sparse_encoder(sentence_transformers, folder, question)
    if modules and question.task is Task.RERANK:
        return _cross_encoder(sentence_transformers, folder, question)
    if question.task is Task.EMBED_SPARSE:
        return _masked_lm(transformers, folder, question)
    return _classifier(transformers, folder, question)


def _embedder(library: Any, folder: Path, model: ModelConfig, question: Question) -> Side:
    if (folder / "modules.json").is_file():
        encoder = library.SentenceTransformer(str(folder), device="cpu", model_kwargs=FLOAT32, **LOCAL)
    else:
        encoder = library.SentenceTransformer(modules=_bare_modules(folder, model), device="cpu")
    _limit(encoder, question.limit)
    return Side(
        encoder,
        lambda text: encoder.encode(text, normalize_embeddings=True, show_progress_bar=False),
        encoder.tokenizer,
        encoder.prompts.get(encoder.default_prompt_name or "", ""),
        {"reference": f"SentenceTransformer {library.__version__}", **_about(encoder)},
    )


def _bare_modules(folder: Path, model: ModelConfig) -> list[Any]:
    """A checkpoint that is no sentence-transformers model: its encoder, pooled as the server pools it."""
    from sentence_transformers.sentence_transformer.modules import Pooling as PoolingModule
    from sentence_transformers.sentence_transformer.modules import Transformer

    encoder = Transformer(str(folder), model_kwargs={**FLOAT32, **LOCAL})
    modes: Any = [name for pooling in model.pooling for name, mode in POOLING_MODES.items() if mode is pooling]
    return [encoder, PoolingModule(encoder.get_embedding_dimension(), modes, include_prompt=model.include_prompt)]


def _sparse_encoder(library: Any, folder: Path, question: Question) -> Side:
    encoder = library.SparseEncoder(str(folder), device="cpu", model_kwargs=FLOAT32, **LOCAL)
    _limit(encoder, question.limit)
    return Side(
        encoder,
        lambda text: encoder.encode(text, convert_to_sparse_tensor=False, show_progress_bar=False),
        encoder.tokenizer,
        encoder.prompts.get(encoder.default_prompt_name or "", ""),
        {"reference": f"SparseEncoder {library.__version__}", **_about(encoder)},
    )


def _cross_encoder(library: Any, folder: Path, question: Question) -> Side:
    encoder = library.CrossEncoder(str(folder), device="cpu", model_kwargs=FLOAT32, **LOCAL)
    identity = torch.nn.Identity()
    return Side(
        encoder,
        lambda text: [encoder.predict((question.query, text), activation_fn=identity, show_progress_bar=False)],
        encoder.tokenizer,
        "",
        {"reference": f"CrossEncoder {library.__version__}", "pooling": "the model's head"},
    )


def _classifier(library: Any, folder: Path, question: Question) -> Side:
    model = library.AutoModelForSequenceClassification.from_pretrained(folder, **FLOAT32, **LOCAL).eval()
    tokenizer = library.AutoTokenizer.from_pretrained(folder, **LOCAL)
    query = (question.query,) if question.task is Task.RERANK else ()
    return Side(
        model,
        lambda text: model(**_encode(tokenizer, model, question, *query, text)).logits[0],
        tokenizer,
        "",
        {"reference": f"{type(model).__name__}, transformers {library.__version__}", "pooling": "the model's head"},
    )


def _masked_lm(library: Any, folder: Path, question: Question) -> Side:
    """SPLADE by its formula, max over tokens of log(1 + relu(logit)): Formal et al., 2021, equation 2."""
    model = library.AutoModelForMaskedLM.from_pretrained(folder, **FLOAT32, **LOCAL).eval()
    tokenizer = library.AutoTokenizer.from_pretrained(folder, **LOCAL)

    def answer(text: str) -> torch.Tensor:
        logits: torch.Tensor = model(**_encode(tokenizer, model, question, text)).logits[0]
        return torch.log1p(torch.relu(logits)).amax(0)

    name = f"{type(model).__name__}, transformers {library.__version__}"
    return Side(model, answer, tokenizer, "", {"reference": name, "pooling": "splade"})


def _encode(tokenizer: Any, model: Any, question: Question, *texts: str) -> dict[str, Any]:
    """With the token types of tokenizer.json wherever the model tells types apart: not every tokenizer returns them."""
    types = {"return_token_type_ids": True} if (getattr(model.config, "type_vocab_size", 0) or 0) > 1 else {}
    encoded = tokenizer(*texts, truncation=True, max_length=question.limit, return_tensors="pt", **types)
    taken = inspect.signature(model.forward).parameters
    return {name: tensor for name, tensor in encoded.items() if name in taken}


def _limit(encoder: Any, limit: int) -> None:
    encoder.max_seq_length = min(encoder.max_seq_length or limit, limit)


def _about(encoder: Any) -> dict[str, str]:
    modules = [type(module).__name__ for module in encoder]
    pooling = next((module for module in encoder if "Pooling" in type(module).__name__), None)
    mode = "splade" if type(pooling).__name__ == "SpladePooling" else getattr(pooling, "pooling_mode", "none")
    text = mode if isinstance(mode, str) else ", ".join(mode)  # several are concatenated
    return {"pooling": text, "modules": ", ".join(modules), "longest input": str(encoder.max_seq_length)}
