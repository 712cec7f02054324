"""Write docs/models.md: every family, and how far it is from transformers, measured by `tei-grpc verify`.

`--check` fails when the families or heads in the document are not those of the registry; it measures nothing.
"""

import argparse
import json
import logging
import os
import platform
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
DOCUMENT = ROOT / "docs" / "models.md"
SPLADE = ("--pooling", "splade")
DTYPES = ("float32", "bfloat16")

PACKED = """# Models

Written by `make docs`, which runs `tei-grpc verify` on every row. Do not edit.

## Packed path

Our own implementation: no padding, no transformers. `tei-grpc models` prints this list. A family that is not measured
below reads a format that transformers reads only with the publisher's code; tests hold it against its definition.
"""
GENERIC = """## Generic path

All other architectures that the installed transformers knows: `pip install 'tei-grpc[generic]'`. Texts are padded, or,
where padding would change a text's own result (FNet, Funnel, MobileBERT, BigBird), run by equal length. Of
encoder-decoders the encoder is served where transformers has it apart (T5, mT5, UMT5); others are refused. Code that
comes with a checkpoint is never run. `--force-generic` takes this path where there is a family, too. A line of the
start-up log says which path a model takes, and why.
"""
MEASURED = """## How far from the reference

Measured {date} on a CPU ({cpu}), with {versions}.
A row is `tei-grpc verify MODEL --dtype DTYPE`, for SPLADE with `--pooling splade`, with the command's built-in texts:
in many scripts, from one word to more than a model takes. The reference is sentence-transformers or transformers, in
float32, one text at a time. Differences are of unit vectors for embeddings, of weights for SPLADE, of raw logits for
classifiers and rerankers. Random checkpoints are tiny: every weight, bias and norm is random, so that nothing can hide
behind a zero or a one.

`tei-grpc verify` does the same for your checkpoint, or, with `--address`, for a running server; it ends with 0 when the
two agree, 1 when they differ, 2 for wrong usage, and 3 when no comparison was possible. In float32, unit vectors may
differ by 1e-5 and by a cosine of 1e-5, sparse weights and logits by 1e-4 (of the largest, where that is above 1); with
16-bit numbers the cosine must be 0.999, and weights and logits may differ by 0.1. It needs
`pip install 'tei-grpc[verify]'`.
"""

Measures = dict[str, Any]


class Measured(NamedTuple):
    """One comparison."""

    family: str  # the beginning of its row
    checkpoint: str
    measures: Measures


def supported() -> list[str]:
    """Every family with what it serves, as the beginning of a row of the document."""
    from tei_grpc.commands.models import serves
    from tei_grpc.models import families

    return [f"| `{name}` | {family.__name__} | {', '.join(serves(family))} |" for name, family in families()]


def is_fresh() -> bool:
    """The document lists what the registry has."""
    lines = DOCUMENT.read_text().splitlines() if DOCUMENT.is_file() else []
    return supported() == [f"{line.rsplit('|', 2)[0]}|" for line in lines if line.startswith("| `")][1:]


def real(folder: Path) -> Iterator[Measured]:
    """The trained checkpoints that `make test` fetches into `folder`, and those that the tests train."""
    from tests.small_heads import small_heads

    heads = small_heads(folder / "all-MiniLM-L6-v2")
    for dtype in DTYPES:
        yield from measure("all-MiniLM-L6-v2", folder / "all-MiniLM-L6-v2", "--dtype", dtype)
        yield from measure("splade-tiny", folder / "splade-tiny", "--dtype", dtype, *SPLADE)
        yield from measure("MiniLM reranker of tests/small_heads.py", heads.reranker, "--dtype", dtype)
        yield from measure("MiniLM classifier of tests/small_heads.py", heads.sentiment, "--dtype", dtype)


def random(folder: Path) -> Iterator[Measured]:
    """The random checkpoints of the tests, of families and of architectures without one."""
    from tests.checkpoints import ROWS, make_checkpoint
    from tests.models.architectures import ARCHITECTURES, make_architecture

    for name, row in ROWS.items():
        options = SPLADE if row.model.endswith("ForMaskedLM") else ()
        made = make_checkpoint(name, folder / name)
        save_tokenizer_again(made)
        yield from measure(f"random: {name}", made, *options)
    for name in ARCHITECTURES:
        yield from measure(f"random: {name}", make_architecture(name, folder / f"generic-{name}"))


def save_tokenizer_again(folder: Path) -> None:
    """As transformers would: for some model types (Qwen2) it takes its own class, whatever the checkpoint says."""
    import transformers

    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder)  # nosec B615 # a folder of our own
    tokenizer.save_pretrained(folder)


def measure(name: str, folder: Path, *options: str) -> Iterator[Measured]:
    """`tei-grpc verify` on one checkpoint. What has no reference is left out, with a line on stderr."""
    from tei_grpc.commands import verify
    from tei_grpc.errors import TeiError

    parser = argparse.ArgumentParser()
    verify.add_arguments(parser)
    try:
        found = verify.run(parser.parse_args([str(folder), *options])).as_dict()
    except TeiError as error:
        print(f"{name}: {error.message}", file=sys.stderr)
        return
    print(name, found["max_difference"], *found["failures"], file=sys.stderr, flush=True)
    yield Measured(_family_of(json.loads((folder / "config.json").read_text())), name, found)


def _family_of(config: dict[str, Any]) -> str:
    from tei_grpc.models import find_family

    family = find_family(config)
    return f"| `{config['model_type']}` | {family.__name__ if family else ''} |"


def write(measured: list[Measured]) -> None:
    """Put the document together."""
    about = MEASURED.format(date=time.strftime("%Y-%m-%d", time.gmtime()), versions=_versions(), cpu=platform.machine())
    DOCUMENT.write_text("\n".join([PACKED, *_families(measured), "", GENERIC, about, *_table(measured), ""]))


def _families(measured: list[Measured]) -> Iterator[str]:
    yield "| `model_type` | family | serves | measured below |"
    yield "|---|---|---|---|"
    tested = [one.family for one in measured]
    for row in supported():
        yield f"{row} {'yes' if any(row.startswith(family) for family in tested) else 'no'} |"


def _versions() -> str:
    import sentence_transformers
    import torch
    import transformers

    libraries = {"torch": torch, "transformers": transformers, "sentence-transformers": sentence_transformers}
    return ", ".join(f"{name} {library.__version__}" for name, library in libraries.items())


def _table(measured: list[Measured]) -> Iterator[str]:
    yield "| checkpoint | task | dtype | path | largest difference | cosine, least | order | within bounds |"
    yield "|---|---|---|---|---|---|---|---|"
    for one in measured:
        found = one.measures
        cosine = "" if found["cosine_min"] is None else f"{found['cosine_min']:.7f}"
        order = {None: "", True: "equal", False: "changed"}[found["order_equal"]]
        path, dtype = found["ours"]["path"], found["ours"]["dtype"]
        cells = [one.checkpoint, found["task"], dtype, path, f"{found['max_difference']:.1e}", cosine, order]
        yield f"| {' | '.join(map(str, cells))} | {'yes' if found['passed'] else '**no**'} |"


def main() -> None:
    """Write or compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare the lists of families instead of writing")
    sys.path.insert(0, str(ROOT))
    if parser.parse_args().check:
        sys.exit(None if is_fresh() else "docs/models.md: the list of families is stale: run `make docs`")
    logging.disable(logging.WARNING)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    with tempfile.TemporaryDirectory() as folder:
        write([*real(ROOT / ".models"), *random(Path(folder))])


if __name__ == "__main__":
    main()
