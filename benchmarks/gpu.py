"""One CUDA device, measured in under eight minutes: BERT-base and BERT-large shapes, random weights, bfloat16.

    python -m benchmarks.gpu [--seconds 0.7] [--parts speed,latency,idle,cosine,served]
    python -m benchmarks.gpu --device cpu        a dry run: tiny shapes, only to see that every part works

speed: tokens per second of the model alone, no tokenizer, as the worker runs it (the next batch is started while one
runs), and which fraction of the device's own bfloat16 matrix products that is; beside it, in turns with it, are
sentence-transformers' and transformers' models (SDPA), on padded batches sorted by length, at the batch size that suits
each best. latency: one text of 16 tokens. idle: the share of the time in which no kernel runs, from torch's profiler,
under load. cosine: least one of a family's token vectors to float32 on the CPU. served: over gRPC, by client processes.
Exits with 2 where there is no CUDA device.
"""

import argparse
import itertools
import math
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers
from torch.nn import functional

from benchmarks.limit import Shape
from benchmarks.measurements import idle_share, in_turns
from benchmarks.padded import peers, run_padded
from benchmarks.swarm import CALLERS, call, server
from benchmarks.workloads import write_texts
from tei_grpc.config import EngineConfig
from tei_grpc.engine.batch import pack
from tei_grpc.engine.runner import Runner
from tei_grpc.loading.model_config import read_model_config
from tei_grpc.types import Batch, Entry, Ints, Kind
from tests.checkpoints import BERT_SPECIAL, make_checkpoint, write_pooling, write_tokenizer
from tests.models.formats import FORMATS

SHAPES = {"BERT-base": Shape(12, 768, 3072), "BERT-large": Shape(24, 1024, 4096)}
TINY = {"tiny BERT": Shape(2, 64, 128)}
HEAD_DIM, LIMIT, VOCABULARY, SMALL_VOCABULARY = 64, 512, 30522, 90
ROUNDS = 3
THEIR_BATCHES = (32, 128, 512)  # texts
CLIENTS, FRONTENDS = 8, (1, 4, 8)  # processes
FAMILIES = ("bert-mean", "roberta", "distilbert", "mpnet", "deberta", "modernbert", "nomic", "gte", "jina-v3",
            "nomic-experts", "mistral-window", "llama", "qwen2", "qwen3", "gemma3", "eurobert")  # fmt: skip


class Setting(NamedTuple):
    """Where and how long to measure."""

    device: str
    seconds: float
    folder: Path

    @property
    def is_dry(self) -> bool:
        """Whether this is only to see that everything works."""
        return self.device == "cpu"

    def wait(self) -> None:
        """Until the device has nothing to do."""
        if not self.is_dry:
            torch.cuda.synchronize()

    def shapes(self) -> dict[str, Shape]:
        """The models."""
        return TINY if self.is_dry else SHAPES

    def tokens(self) -> int:
        """Of a batch."""
        return 1024 if self.is_dry else 16384


class Line(NamedTuple):
    """A line of the table."""

    what: str
    subject: str
    value: str
    note: str = ""


def model_folder(setting: Setting, name: str) -> Path:
    """A checkpoint of that shape, made once."""
    folder, shape = setting.folder / name.replace(" ", "-"), setting.shapes()[name]
    if not folder.is_dir():
        torch.manual_seed(0)
        config = transformers.BertConfig(
            vocab_size=VOCABULARY,
            hidden_size=shape.hidden,
            num_hidden_layers=shape.layers,
            num_attention_heads=shape.hidden // HEAD_DIM,
            intermediate_size=shape.intermediate,
        )
        transformers.BertModel(config).save_pretrained(folder)
        write_tokenizer(folder, BERT_SPECIAL, LIMIT)
        write_pooling(folder, "mean", shape.hidden)
    return folder


def load(setting: Setting, folder: Path, **options: Any) -> Runner:
    """Our runner, warm."""
    options = {"max_batch_tokens": setting.tokens(), "device": setting.device, **options}
    config = EngineConfig(model_id=str(folder), **options)
    runner = Runner(read_model_config(folder, config), config)
    runner.warm_up()
    return runner


def workloads(tokens: int) -> dict[str, list[int]]:
    """Lengths of texts of four batches; the mixed ones are lognormal, median 80, as passages are."""
    total, generator = 4 * tokens, np.random.default_rng(0)
    lengths = np.clip(generator.lognormal(math.log(80), 0.7, tokens), 8, LIMIT).astype(int)
    found = {f"{length} tokens": [length] * (total // length) for length in (32, 50, 128, 512)}
    return found | {"mixed lengths": lengths[: np.searchsorted(lengths.cumsum(), total)].tolist()}


def ids_of(lengths: Sequence[int]) -> list[Ints]:
    """Random texts."""
    generator = np.random.default_rng(1)
    return [generator.integers(5, VOCABULARY, length, dtype=np.int32) for length in lengths]


def batches_of(texts: Sequence[Ints], tokens: int) -> list[Batch]:
    """In order of arrival, as the queue forms them."""
    parts: list[list[Entry]] = [[]]
    for row, text in enumerate(texts):
        if sum(map(len, parts[-1])) + len(text) > tokens:
            parts.append([])
        parts[-1].append(Entry(row, Kind.EMBED, text))
    return [pack(sorted(part, key=len)) for part in parts]


def run_ahead(runner: Runner, batches: Iterable[Batch]) -> None:
    """As the worker does: the next batch is started, then the one before is awaited."""
    waiting = None
    for batch in batches:
        started = runner.launch(batch)
        if waiting:
            waiting.collect()
        waiting = started
    if waiting:
        waiting.collect()


def rate(run: Callable[[], object], tokens: int, setting: Setting) -> float:
    """Tokens per second."""
    run()
    setting.wait()
    rounds, start = 0, time.perf_counter()
    while rounds == 0 or time.perf_counter() - start < setting.seconds:
        run()
        setting.wait()
        rounds += 1
    return rounds * tokens / (time.perf_counter() - start)


def gemm_rate(setting: Setting, shape: Shape) -> float:
    """FLOP/s of the linear layers alone, in bfloat16."""
    rows, options = setting.tokens(), {"device": setting.device, "dtype": torch.bfloat16}
    pairs = [(torch.randn(rows, size, **options), torch.randn(out, size, **options)) for size, out in shape.linears()]
    flops = sum(2 * rows * size * out for size, out in shape.linears())
    return rate(lambda: [functional.linear(x, weight) for x, weight in pairs], flops, setting)


def measure_speed(setting: Setting) -> Iterator[Line]:
    """Ours against the device's matrix products and against peers."""
    for name, shape in setting.shapes().items():
        folder = model_folder(setting, name)
        runner, others = load(setting, folder, dtype="bfloat16"), peers(folder, setting.device)
        limit = gemm_rate(setting, shape)
        yield Line(name, "matrix products", f"{limit / 1e12:,.2f} TFLOP/s", f"attention on {runner.facts.kernels}")
        for workload, lengths in workloads(setting.tokens()).items():
            what, tokens, texts = f"{name}, {workload}", sum(lengths), ids_of(lengths)
            sizes = THEIR_BATCHES[: 1 if setting.is_dry else None]
            runs = {(other, size): partial(run_padded, forward, texts, size, setting.device)
                    for other, forward in others.items() for size in sizes}  # fmt: skip
            runs["ours", 0] = partial(run_ahead, runner, batches_of(texts, setting.tokens()))
            short = setting._replace(seconds=setting.seconds / ROUNDS)
            found = in_turns(runs, partial(rate, tokens=tokens, setting=short), ROUNDS)
            ours = found["ours", 0]
            fraction = ours / tokens * shape.flops(lengths) / limit
            yield Line(what, "ours", f"{ours:,.0f} tokens/s", f"{fraction:.0%} of matrix products")
            for other in others:
                best = max(found[other, size] for size in sizes)
                yield Line(what, other, f"{best:,.0f} tokens/s", f"ours is {ours / best:.2f} times as fast")


def measure_latency(setting: Setting) -> Iterator[Line]:
    """One short text at a time, from token ids to a vector on the host."""
    for name in setting.shapes():
        runner = load(setting, model_folder(setting, name), dtype="bfloat16")
        (batch,), seconds = batches_of(ids_of([16]), setting.tokens()), []
        for _ in range(20 if setting.is_dry else 300):
            start = time.perf_counter()
            runner.run(batch)
            seconds.append(time.perf_counter() - start)
        p50, p99 = np.percentile(seconds, (50, 99)) * 1e3
        yield Line(f"{name}, one text of 16 tokens", "ours", f"{p50:.2f} ms", f"p99 {p99:.2f} ms")


def measure_idle(setting: Setting) -> Iterator[Line]:
    """From the first kernel to the last: how much of the time none runs."""
    if setting.is_dry:
        yield Line("idle between batches", "ours", "-", "not measured: needs a CUDA device")
        return
    for name in setting.shapes():
        runner = load(setting, model_folder(setting, name), dtype="bfloat16")
        for workload, lengths in workloads(setting.tokens()).items():
            batches = batches_of(ids_of(lengths), setting.tokens())
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
                run_ahead(runner, itertools.islice(itertools.cycle(batches), 20))
                setting.wait()
            kernels = [
                (event.time_range.start, event.time_range.end)
                for event in profile.events()
                if event.device_type == torch.autograd.DeviceType.CUDA and not event.name.startswith(("Mem", "mem"))
            ]
            yield Line(f"{name}, {workload}", "ours", f"{idle_share(kernels):.1%} idle", "under load")


def measure_cosine(setting: Setting) -> Iterator[Line]:
    """Each family, tiny, in 16 bits on the device, against float32 on the CPU."""
    texts = ids_of([7, 25, 38])
    for name in FAMILIES[: 2 if setting.is_dry else None]:
        folder = setting.folder / name
        FORMATS[name](folder) if name in FORMATS else make_checkpoint(name, folder)
        entries = [Entry(row, Kind.EMBED_ALL, text % SMALL_VOCABULARY) for row, text in enumerate(texts)]
        expected = load(setting._replace(device="cpu"), folder, dtype="float32").run(pack(entries))
        for dtype in ("float16", "bfloat16"):
            found = load(setting, folder, dtype=dtype, max_batch_tokens=256).run(pack(entries))
            cosine = min(
                float(functional.cosine_similarity(*map(torch.from_numpy, (a, b)), dim=-1).min())
                for (a,), (b,) in zip(found, expected, strict=True)
            )
            yield Line(f"{name}, {dtype}", "ours", f"{cosine:.5f}", "least cosine to float32 on the CPU")


def measure_served(setting: Setting) -> Iterator[Line]:
    """Over gRPC, with clients in processes of their own."""
    name = next(iter(setting.shapes()))
    folder, processes = model_folder(setting, name), 1 if setting.is_dry else CLIENTS
    options = ["--device", setting.device, "--dtype", "bfloat16", "--max-batch-tokens", str(setting.tokens())]
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        for count in (0,) if setting.is_dry else FRONTENDS:
            more = ["--max-concurrent-requests", "16384", "--frontends", str(count)]
            with server(folder, *options, *more) as address:
                for length in (50, 512):
                    texts = write_texts(folder, [length] * (8 if setting.is_dry else 512))
                    pool.starmap(call, [(address, texts[:CALLERS], 0.1)] * processes)
                    start = time.perf_counter()
                    answered = sum(pool.starmap(call, [(address, texts, 2 * setting.seconds)] * processes))
                    found = answered / (time.perf_counter() - start)
                    what, subject = f"{name} over gRPC, {length} tokens", f"{count} front-ends"
                    yield Line(what, subject, f"{found:,.0f} texts/s", f"{found * length:,.0f} tokens/s")


PARTS = {
    "speed": measure_speed,
    "latency": measure_latency,
    "idle": measure_idle,
    "cosine": measure_cosine,
    "served": measure_served,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a line for each measurement as it comes; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="cpu is a dry run")
    parser.add_argument("--seconds", type=float, default=0.7, help="of each measurement [default: %(default)s]")
    parser.add_argument("--parts", default=",".join(PARTS), help="[default: %(default)s]")
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        print("there is no CUDA device here: nothing was measured (`--device cpu` is a dry run)", file=sys.stderr)
        return 2
    where = (
        "a dry run on the CPU: no number means anything" if options.device == "cpu" else torch.cuda.get_device_name()
    )
    print(f"# {where}; torch {torch.__version__}, transformers {transformers.__version__}")
    with tempfile.TemporaryDirectory() as temporary:
        setting = Setting(options.device, options.seconds, Path(temporary))
        for part in options.parts.split(","):
            for line in PARTS[part](setting):
                print(f"{line.what:34}  {line.subject:22}  {line.value:>20}  {line.note}", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
