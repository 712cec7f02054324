"""`tei-grpc bench`: how fast the user's own model is on the user's own machine, and which flags suit it."""

import argparse
import sys
import typing
from pathlib import Path

from tei_grpc import cpus
from tei_grpc.commands.bench.advice import advise
from tei_grpc.commands.bench.report import Report
from tei_grpc.commands.bench.texts import make_texts
from tei_grpc.commands.verify.texts import read_texts
from tei_grpc.config import EngineConfig
from tei_grpc.errors import StartupError
from tei_grpc.loading import hub
from tei_grpc.loading.model_config import read_model_config

TEXTS = 512
DTYPES: tuple[str, ...] = typing.get_args(typing.get_args(EngineConfig.model_fields["dtype"].annotation)[0])
SLOW = "float16"  # on CPUs; measured when asked for


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What the command takes."""
    parser.add_argument("model", metavar="MODEL", help="a Hugging Face Hub id, or a local directory")
    parser.add_argument("--texts", type=Path, metavar="FILE", help="texts, one a line, instead of the built-in ones")
    parser.add_argument(
        "--dtype", nargs="+", choices=DTYPES, metavar="DTYPE", help="what to try [default: all but float16]"
    )
    parser.add_argument(
        "--seconds", type=float, default=1.0, help="length of one measurement, about [default: %(default)s]"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def bench(arguments: argparse.Namespace) -> int:
    """Measure, print, and return the exit code. Raises StartupError when the model cannot be run at all."""
    report = run(arguments)
    print(report.as_json() if arguments.json else report.as_table())
    return 0


def run(arguments: argparse.Namespace) -> Report:
    """Measure. Raises StartupError."""
    cpus.tune_process()
    from tei_grpc.commands.bench import subject  # loads torch

    texts = read_texts(arguments.texts) if arguments.texts else make_texts(TEXTS)
    config = EngineConfig(model_id=arguments.model)
    model = read_model_config(hub.fetch(config).folder, config)
    encoded = subject.encode(model, config, texts)
    dtypes = sorted(arguments.dtype or [name for name in DTYPES if name != SLOW], key=DTYPES.index)
    speeds = []
    for dtype in dtypes:
        try:
            typed = config.model_copy(update={"dtype": dtype})
            speeds.append(subject.measure(model, typed, encoded, arguments.seconds))
        except StartupError as error:  # this CPU, or this model, cannot do it
            print(f"tei-grpc: {dtype} left out: {error.message}", file=sys.stderr)
    if not speeds:
        raise StartupError("no dtype could be measured")
    advice = advise(arguments.model, speeds, encoded.seconds)
    return Report(arguments.model, cpus.available(), encoded, speeds, advice)
