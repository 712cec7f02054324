"""The command `tei-grpc`: flags and environment, then a command. Without a sub-command it serves.

Only what a command needs is imported: `--help` and `health` never load torch.
"""

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from tei_grpc import __version__
from tei_grpc.errors import StartupError

if TYPE_CHECKING:
    from tei_grpc.config import Settings
    from tei_grpc.metrics import Metrics

USAGE_ERROR = 2
FAILURE = 1
INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return the process's exit code."""
    argv = sys.argv[1:] if argv is None else argv
    try:
        if argv and argv[0] in COMMANDS:
            return COMMANDS[argv[0]](argv[1:])
        return _serve(_read_flags(argv))
    except StartupError as error:
        return _complain(error.message, FAILURE)
    except KeyboardInterrupt:
        return INTERRUPTED


class _Parser(argparse.ArgumentParser):
    """argparse, with errors on one line and without the text of values, which may be secrets."""

    def error(self, message: str) -> NoReturn:
        raise SystemExit(_complain(f"{message.removeprefix('argument ')}; see `{self.prog} --help`", USAGE_ERROR))

    def parse_known_flags(self, argv: Sequence[str]) -> dict[str, object]:
        namespace, unknown = self.parse_known_args(argv)
        if flags := [text.partition("=")[0] for text in unknown if text.startswith("-")]:
            self.error(f"unknown option {', '.join(f'`{flag}`' for flag in flags)}")
        if unknown:
            if unknown[0] == argv[0]:
                self.error(f"`{argv[0]}` is no command; there are: {', '.join(COMMANDS)}")
            self.error("a value without an option; every value follows its `--option`")
        return vars(namespace)


def _read_flags(argv: Sequence[str]) -> dict[str, object]:
    """Return the given flags by field name, as text."""
    return _serve_parser().parse_known_flags(argv)


def _serve_parser() -> _Parser:
    from tei_grpc.config import GROUPS, Settings, flag

    parser = _Parser(
        prog="tei-grpc",
        description="Serve a text-embedding model over gRPC (tei.v1). Every option has an environment name; flags win.",
        epilog="Other commands: health, models, verify, bench; `tei-grpc COMMAND --help`.",
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=8, width=100),
        usage="tei-grpc --model-id MODEL [OPTIONS]",
    )
    parser.add_argument("-V", "--version", action="version", version=f"tei-grpc {__version__}")
    parser.add_argument(flag("hf_api_token"), help=argparse.SUPPRESS)
    for group in GROUPS:
        arguments = parser.add_argument_group(group.__doc__)
        for name in group.model_fields:
            _add_option(arguments, name, Settings)
    return parser


def _add_option(arguments: argparse._ArgumentGroup, name: str, settings: "type[Settings]") -> None:
    from tei_grpc.config import flag

    field = settings.model_fields[name]
    spellings = ["-p", flag(name)] if name == "port" else [flag(name)]
    keywords: dict[str, Any] = {"dest": name, "metavar": "VALUE", "help": _help(name, settings)}
    if field.annotation is bool:  # bare, or with a value
        keywords |= {"nargs": "?", "const": "true", "metavar": "true|false"}
    if isinstance(field.default, tuple):
        keywords |= {"action": "append"}
    arguments.add_argument(*spellings, **keywords)


def _help(name: str, settings: "type[Settings]") -> str:
    field = settings.model_fields[name]
    default = "" if field.is_required() or field.default in (None, ()) else f" [default: {_spell(field.default)}]"
    return f"{field.description} [env: {name.upper()}]{default}".replace("%", "%%")


def _spell(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)


def _serve(flags: Mapping[str, object]) -> int:
    from tei_grpc import cpus
    from tei_grpc.invocation import load

    cpus.tune_process()
    try:
        settings, warnings = load(flags, os.environ)
        settings.api_keys()
    except StartupError as error:
        return _complain(error.message, USAGE_ERROR)
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # its own lines about every failed handshake fit no log format
    _start_logging(settings, warnings)
    return _run_server(settings)


def _start_logging(settings: "Settings", warnings: list[str]) -> None:
    import logging

    from tei_grpc import logs
    from tei_grpc.config import describe

    logs.configure(settings.log_level, json_output=settings.json_output, disable_spans=settings.disable_spans)
    logger = logging.getLogger("tei_grpc.cli")
    logger.info("Starting tei-grpc %s", __version__, extra={"options": describe(settings)})
    if logs.parse_levels(settings.log_level) == {"": logging.INFO} and settings.log_level.strip().lower() != "info":
        logger.warning("`--log-level` (LOG_LEVEL) %r cannot be read; `info` is used", settings.log_level)
    for warning in warnings:
        logger.warning("%s", warning)


def _run_server(settings: "Settings") -> int:
    import asyncio

    from tei_grpc.engine.engine import Engine
    from tei_grpc.metrics import Metrics
    from tei_grpc.serve.grpc_server import serve
    from tei_grpc.traces import open_traces

    if settings.frontends:
        return _run_frontends(settings)
    metrics, traces = Metrics(), open_traces(settings)
    _show_metrics(metrics, settings)
    try:
        return asyncio.run(serve(settings, Engine(settings, metrics=metrics, traces=traces)))
    finally:
        if traces is not None:
            traces.close()


def _run_frontends(settings: "Settings") -> int:
    import asyncio

    from tei_grpc.frontends.files import make_files, map_metrics
    from tei_grpc.frontends.server import FrontendsServer
    from tei_grpc.metrics import Metrics
    from tei_grpc.runtime.life import serve

    files = make_files()
    metrics = Metrics(others=map_metrics(files.metrics, settings.frontends))
    _show_metrics(metrics, settings)
    return asyncio.run(serve(lambda: FrontendsServer(settings, files, metrics), settings))


def _show_metrics(metrics: "Metrics", settings: "Settings") -> None:
    import logging

    from tei_grpc.metrics import MetricsListener

    if settings.prometheus_port:
        listener = MetricsListener(metrics, settings.hostname, settings.prometheus_port)
        logging.getLogger("tei_grpc.cli").info("Serving metrics on http://%s/metrics", listener.address)


def _check_health(argv: Sequence[str]) -> int:
    parser = _Parser(
        prog="tei-grpc health", description="Ask a running server whether it serves; exit code 0: it does."
    )
    parser.add_argument(
        "--address", help=f"host:port, or unix:PATH [default, by the environment: {_local_address(os.environ)}]"
    )
    parser.add_argument("--pid", type=int, help="the server's process, whose flags say more than the environment")
    parser.add_argument(
        "--service", default="", help="a service's name, like tei.v1.Embed; all of the server when left out"
    )
    parser.add_argument("--timeout", type=float, default=5.0, metavar="SECONDS", help="[default: %(default)s]")
    arguments = parser.parse_args(argv)
    from tei_grpc.commands import health

    address = arguments.address or _local_address({**os.environ, **_flags_of(arguments.pid)})
    return health.check(address, service=arguments.service, timeout=arguments.timeout)


def _show_models(argv: Sequence[str]) -> int:
    parser = _Parser(prog="tei-grpc models", description="List the models that this server has its own code for.")
    parser.add_argument("--json", action="store_true", help="print one JSON array")
    arguments = parser.parse_args(argv)
    from tei_grpc.commands import models

    return models.show(as_json=arguments.json)


def _verify(argv: Sequence[str]) -> int:
    from tei_grpc.commands import verify

    parser = _Parser(
        prog="tei-grpc verify",
        description="Compare this server's answers with those of transformers or sentence-transformers.",
        epilog="Exit codes: 0 they agree, 1 they differ, 2 wrong usage, 3 no comparison was possible.",
    )
    verify.add_arguments(parser)
    return verify.verify(parser.parse_args(argv))


def _bench(argv: Sequence[str]) -> int:
    from tei_grpc.commands import bench

    parser = _Parser(
        prog="tei-grpc bench",
        description="Measure how fast a model is on this machine, and suggest flags.",
    )
    bench.add_arguments(parser)
    return bench.bench(parser.parse_args(argv))


COMMANDS = {"health": _check_health, "models": _show_models, "verify": _verify, "bench": _bench}


def _local_address(environ: Mapping[str, str]) -> str:
    """Where a server with this environment listens, seen from its own machine."""
    if (port := environ.get("HEALTH_PORT", "")).isdecimal():
        return f"127.0.0.1:{port}"
    if path := environ.get("UDS_LISTEN"):
        return f"unix:{path}"
    port = environ.get("PORT", "")
    return f"127.0.0.1:{port if port.isdecimal() else 3000}"


def _flags_of(pid: int | None) -> dict[str, str]:
    """The flags that a process was given, by environment name; none where there is no such process."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    except OSError:
        return {}
    # a container's first process may be an init, which has the server behind `--`; what is no flag of ours is left out
    namespace, _ = _serve_parser().parse_known_args([word for word in words if word != "--"])
    return {name.upper(): value for name, value in vars(namespace).items() if isinstance(value, str)}


def _complain(message: str, code: int) -> int:
    for line in message.splitlines():
        print(f"tei-grpc: {line}", file=sys.stderr)
    return code
