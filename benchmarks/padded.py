"""Models of sentence-transformers and transformers, run on padded batches of token ids."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from tei_grpc.types import Ints

Forward = Callable[[dict[str, torch.Tensor]], Any]


def peers(folder: Path, device: str) -> dict[str, Forward]:
    """Models of sentence-transformers and transformers; each ends with a vector per text on the host."""
    from sentence_transformers import SentenceTransformer

    options = {"dtype": torch.bfloat16, "attn_implementation": "sdpa"}
    theirs = SentenceTransformer(str(folder), device=device, model_kwargs=options)
    plain = transformers.AutoModel.from_pretrained(folder, **options).to(device).eval()
    return {
        "sentence-transformers": lambda features: theirs.forward(features)["sentence_embedding"].float().cpu(),
        "transformers, SDPA": lambda features: plain(**features)[0][:, 0].float().cpu(),
    }


def run_padded(forward: Forward, texts: Sequence[Ints], size: int, device: str) -> None:
    """Padded batches sorted by length, as sentence-transformers' `encode` makes them; vectors come to the host."""
    ordered = sorted(texts, key=len, reverse=True)
    with torch.inference_mode():
        for start in range(0, len(ordered), size):
            some = [torch.from_numpy(text.astype(np.int64)) for text in ordered[start : start + size]]
            ids = torch.nn.utils.rnn.pad_sequence(some, batch_first=True)
            forward({"input_ids": ids.to(device), "attention_mask": (ids != 0).long().to(device)})
