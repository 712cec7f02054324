"""`tei-grpc verify`: the same texts through this server and through transformers or sentence-transformers.

Exit codes: 0 the two agree within the bounds, 1 they differ, 2 wrong usage, 3 no comparison was possible.
"""

import argparse
import os
import sys
import typing
from pathlib import Path

from tei_grpc.commands.verify import remote, report, subject
from tei_grpc.commands.verify.answers import question_of
from tei_grpc.commands.verify.comparison import compare
from tei_grpc.commands.verify.progress import Progress
from tei_grpc.commands.verify.texts import QUERY, TEXTS, read_texts
from tei_grpc.config import EngineConfig
from tei_grpc.errors import TeiError
from tei_grpc.loading import hub
from tei_grpc.loading.model_config import ModelConfig, read_model_config

AGREE, DIFFER, IMPOSSIBLE = 0, 1, 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What the command takes."""
    parser.add_argument("model", metavar="MODEL", help="a Hugging Face Hub id, or a local directory")
    parser.add_argument("--reference", metavar="DIR", help="compare with this model instead of MODEL itself")
    parser.add_argument("--texts", type=Path, metavar="FILE", help="texts, one a line, instead of the built-in ones")
    parser.add_argument("--query", default=QUERY, metavar="TEXT", help="what a reranker gets with every text")
    parser.add_argument("--pooling", choices=_choices("pooling"), help="as for the server")
    parser.add_argument("--dtype", choices=_choices("dtype"), help="as for the server")
    parser.add_argument("--force-generic", action="store_true", help="as for the server")
    parser.add_argument("--address", metavar="HOST:PORT", help="compare a running server instead of loading MODEL")
    parser.add_argument("--api-key", default=os.environ.get("API_KEY"), metavar="KEY", help="for that server [API_KEY]")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--histogram", type=Path, metavar="FILE.png", help="draw the differences")


def verify(arguments: argparse.Namespace) -> int:
    """Compare, print, and return the exit code."""
    try:
        result = run(arguments)
    except TeiError as error:
        print(f"tei-grpc: {error.message}", file=sys.stderr)
        return IMPOSSIBLE
    print(result.as_json() if arguments.json else result.as_table())
    return AGREE if result.comparison.passed else DIFFER


def run(arguments: argparse.Namespace) -> report.Report:
    """Compare. Raises TeiError when either side cannot be asked."""
    if arguments.histogram:
        report.import_matplotlib()
    texts = read_texts(arguments.texts) if arguments.texts else TEXTS
    config = _engine_config(arguments)
    model = _read(config)
    question = question_of(model, texts, arguments.query)
    with Progress("this server" if arguments.address is None else arguments.address, len(texts)) as progress:
        if arguments.address:
            ours = remote.ask(arguments.address, question, arguments.api_key, progress)
        else:
            ours = subject.ask(config, model, question, progress)
    from tei_grpc.commands.verify import reference  # loads torch

    folder = _folder(arguments.reference, model)
    with Progress("reference", len(texts)) as progress:
        expected = reference.ask(folder, model, question, progress)
    result = report.Report(arguments.model, question, ours, expected, compare(question.task, ours, expected))
    if arguments.histogram:
        result.draw(arguments.histogram)
    return result


def _engine_config(arguments: argparse.Namespace) -> EngineConfig:
    return EngineConfig(
        model_id=arguments.model,
        pooling=arguments.pooling,
        dtype=arguments.dtype,
        force_generic=arguments.force_generic,
        max_client_batch_size=1_000_000,  # how many texts are compared is the caller's business
    )


def _read(config: EngineConfig) -> ModelConfig:
    return read_model_config(hub.fetch(config).folder, config)


def _folder(reference: str | None, model: ModelConfig) -> Path:
    if reference is None:
        return model.folder
    return hub.fetch(EngineConfig(model_id=reference)).folder


def _choices(option: str) -> tuple[str, ...]:
    """The values of a Literal[...] | None of EngineConfig."""
    literal, _ = typing.get_args(EngineConfig.model_fields[option].annotation)
    return typing.get_args(literal)
