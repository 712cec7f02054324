"""One way to turn texts into vectors, alone in a process that answers orders on stdin. See benchmarks/compare.py.

It runs in the environment of the peers, too, so it imports nothing of ours but where it runs ours.
"""

import asyncio
import gc
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

PADDED_BATCH = 32
INPUTS = ("input_ids", "attention_mask", "token_type_ids")

Encode = Callable[[Sequence[str]], np.ndarray]  # texts -> [texts, size] float32, of unit length, in their order
Run = Callable[[list[dict[str, np.ndarray]]], list[np.ndarray]]  # padded batches -> hidden states of each


def open_ours(folder: Path, threads: int, dtype: str) -> Encode:
    """The engine, with a list of texts as all others; it finds out by itself how many threads it may have."""
    from tei_grpc.config import EngineConfig
    from tei_grpc.engine.engine import Engine

    loop = asyncio.Runner()
    engine = Engine(EngineConfig(model_id=str(folder), dtype=dtype))
    loop.run(engine.start())
    return lambda texts: loop.run(engine.embed_many(texts)).embeddings


def open_sentence_transformers(folder: Path, threads: int, dtype: str) -> Encode:
    """Its `encode`, which sorts by length and pads batches of 32."""
    import torch
    from sentence_transformers import SentenceTransformer

    torch.set_num_threads(threads)
    model = SentenceTransformer(str(folder), device="cpu", model_kwargs={"dtype": dtype})

    def encode(texts: Sequence[str]) -> np.ndarray:
        found = model.encode(list(texts), batch_size=PADDED_BATCH, normalize_embeddings=True, convert_to_tensor=True)
        return found.float().numpy()

    return encode


def open_onnxruntime(folder: Path, threads: int, dtype: str) -> Encode:
    """Padded batches, one after the other, on all threads."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession(str(export(folder)), options, providers=["CPUExecutionProvider"])
    names = {given.name for given in session.get_inputs()}

    def run(batches: list[dict[str, np.ndarray]]) -> list[np.ndarray]:
        return [session.run(None, {n: a for n, a in batch.items() if n in names})[0] for batch in batches]

    return _padded(folder, run)


def open_openvino(folder: Path, threads: int, dtype: str) -> Encode:
    """Padded batches, as many at a time as OpenVINO finds best for throughput."""
    import openvino

    core = openvino.Core()
    precision = {"float32": openvino.Type.f32, "bfloat16": openvino.Type.bf16}[dtype]
    settings = {"INFERENCE_PRECISION_HINT": precision, "INFERENCE_NUM_THREADS": threads}
    model = core.compile_model(export(folder), "CPU", {"PERFORMANCE_HINT": "THROUGHPUT", **settings})
    names = {name for port in model.inputs for name in port.names}

    def run(batches: list[dict[str, np.ndarray]]) -> list[np.ndarray]:
        queue, found = openvino.AsyncInferQueue(model), [np.empty(0)] * len(batches)
        queue.set_callback(lambda request, row: found.__setitem__(row, request.get_output_tensor(0).data.copy()))
        for row, batch in enumerate(batches):
            queue.start_async({name: array for name, array in batch.items() if name in names}, row)
        queue.wait_all()
        return found

    return _padded(folder, run)


def open_infinity(folder: Path, threads: int, dtype: str) -> Encode:
    """The engine of infinity, on torch, without its HTTP server."""
    import torch
    from infinity_emb import AsyncEmbeddingEngine, EngineArgs

    torch.set_num_threads(threads)
    loop = asyncio.Runner()
    arguments = EngineArgs(
        model_name_or_path=str(folder), engine="torch", device="cpu", dtype=dtype, model_warmup=False
    )
    engine = AsyncEmbeddingEngine.from_args(arguments)
    loop.run(engine.astart())

    def encode(texts: Sequence[str]) -> np.ndarray:
        vectors, _ = loop.run(engine.embed(sentences=list(texts)))
        return np.stack(vectors).astype(np.float32)

    return encode


OPENERS: dict[str, Callable[[Path, int, str], Encode]] = {
    "ours": open_ours,
    "sentence-transformers": open_sentence_transformers,
    "onnxruntime": open_onnxruntime,
    "openvino": open_openvino,
    "infinity": open_infinity,
}


def _padded(folder: Path, run: Run) -> Encode:
    """Tokenize, sort by length, pad batches of 32, run, take the mean over each text, normalize."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.enable_truncation(json.loads((folder / "sentence_bert_config.json").read_text())["max_seq_length"])
    tokenizer.no_padding()

    def encode(texts: Sequence[str]) -> np.ndarray:
        ids = [encoding.ids for encoding in tokenizer.encode_batch(list(texts))]
        order = sorted(range(len(ids)), key=lambda row: len(ids[row]))
        batches = [_pad([ids[row] for row in some]) for some in _cut(order, PADDED_BATCH)]
        pooled = np.concatenate([_mean(h, b["attention_mask"]) for h, b in zip(run(batches), batches, strict=True)])
        return pooled[np.argsort(order)]

    return encode


def _cut(rows: list[int], size: int) -> list[list[int]]:
    return [rows[start : start + size] for start in range(0, len(rows), size)]


def _pad(texts: list[list[int]]) -> dict[str, np.ndarray]:
    ids = np.zeros((len(texts), max(map(len, texts))), np.int64)
    mask = np.zeros_like(ids)
    for row, text in enumerate(texts):
        ids[row, : len(text)], mask[row, : len(text)] = text, 1
    return dict(zip(INPUTS, (ids, mask, np.zeros_like(ids)), strict=True))


def _mean(hidden: np.ndarray, mask: np.ndarray) -> np.ndarray:
    summed: np.ndarray = np.einsum("bth,bt->bh", hidden, mask.astype(np.float32))  # the norm takes the count away
    return summed / np.linalg.norm(summed, axis=1, keepdims=True)


def export(folder: Path) -> Path:
    """The encoder as ONNX, beside its weights; made once."""
    file = folder / "onnx" / "model.onnx"
    if not file.is_file():
        import torch
        from transformers import AutoModel

        file.parent.mkdir(exist_ok=True)
        model = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
        sample = {name: torch.ones(2, 8, dtype=torch.long) for name in INPUTS}
        axes = {0: torch.export.Dim("texts"), 1: torch.export.Dim("tokens", max=512)}
        partial = file.with_name("partial.onnx")
        torch.onnx.export(
            model,
            kwargs=sample,
            f=str(partial),
            dynamic_shapes=dict.fromkeys(sample, axes),
            output_names=["last_hidden_state"],
            external_data=False,
        )
        partial.rename(file)
    return file


def main() -> None:
    """`peers.py NAME DTYPE FOLDER TEXTS.json CORES`: answer each line, the name of a workload, with seconds."""
    name, dtype, folder, texts_file, cores = sys.argv[1:]
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries print; only answers go where answers are read
    os.sched_setaffinity(0, {int(core) for core in cores.split(",")})
    workloads: dict[str, list[str]] = json.loads(Path(texts_file).read_text())
    encode = OPENERS[name](Path(folder), len(cores.split(",")), dtype)
    gc.freeze()  # as our server does, for all: what is loaded is not garbage
    _say(answers, {"ready": True})
    for line in sys.stdin:
        order = json.loads(line)
        wall, cpu = time.perf_counter(), time.process_time()
        vectors = encode(workloads[order["workload"]])
        _say(answers, {"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu})
        if order.get("save"):
            np.save(order["save"], vectors)
            _say(answers, {"saved": True})
    os._exit(0)  # OpenVINO's teardown, at times, never ends


def _say(answers: Any, answer: dict[str, Any]) -> None:
    print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
