"""Feeds calls, or checkpoints, with inputs that nobody meant to send, until one is not answered cleanly.

`python tests/fuzz/run.py calls --runs 1000000` and `python tests/fuzz/run.py checkpoints --runs 100000` print how many
inputs came to what. With atheris (extra `fuzz`) inputs that reach new code are kept and varied; without it they are
random, by `--seed`. One that is not answered cleanly, hangs, or takes too much memory ends the run with the reason.
"""

import argparse
import faulthandler
import importlib.util
import logging
import os
import random
import resource
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

MEMORY = 4 << 30  # bytes of address space that inputs may take beyond what the process has at the beginning
LONGEST = 2048  # bytes that an input is drawn from
VARIANTS = 100  # of each call
SECONDS = 300  # after which an input counts as hung, whatever holds it up
LINES_EVERY = 10_000
FIRST_INPUTS = 100  # that atheris begins with


class Target(NamedTuple):
    """What takes inputs, and what they came to."""

    check: Callable[[bytes], object]
    outcomes: Counter[str]
    folder: Path  # for files that end with the run


def main() -> None:
    """Run, and print the outcomes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", choices=("calls", "checkpoints"))
    parser.add_argument("--runs", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        guided = importlib.util.find_spec("atheris") is not None
        target = _open_instrumented(options.target, folder, stack) if guided else _open(options.target, folder, stack)
        _limit_memory()
        run = _run_guided if guided else _run_random
        run(target, options.runs, options.seed)


def _open(name: str, folder: Path, stack: ExitStack) -> Target:
    if name == "calls":
        from tests.fuzz.calls import fuzz_calls, open_stage

        stage = stack.enter_context(open_stage(folder))
        return Target(fuzz_calls(stage, variants=VARIANTS).hypothesis.fuzz_one_input, stage.outcomes, folder)
    from tests.fuzz.checkpoints import fuzz_checkpoints, open_shelf

    shelf = stack.enter_context(open_shelf(folder))
    return Target(fuzz_checkpoints(shelf).hypothesis.fuzz_one_input, shelf.outcomes, folder)


def _open_instrumented(name: str, folder: Path, stack: ExitStack) -> Target:
    """As `_open`, where atheris sees which lines of ours an input reaches."""
    import atheris

    with atheris.instrument_imports(include=["tei_grpc"]):
        return _open(name, folder, stack)


def _limit_memory() -> None:
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))


def _run_random(target: Target, runs: int, seed: int) -> None:
    rng = random.Random(seed)
    started, told = time.monotonic(), 0
    while (done := target.outcomes.total()) < runs:  # bytes that nothing can be drawn from do not count
        faulthandler.dump_traceback_later(SECONDS, exit=True)
        target.check(rng.randbytes(rng.randrange(LONGEST)))
        if done >= told + LINES_EVERY:
            told = done
            print(f"{done} inputs, {time.monotonic() - started:.0f} s", flush=True)
    faulthandler.cancel_dump_traceback_later()
    _report(target)


def _run_guided(target: Target, runs: int, seed: int) -> None:
    """libFuzzer ends the process; what there is to say is said before."""
    import atheris

    def check(raw: bytes) -> None:
        target.check(raw)
        if target.outcomes.total() >= runs:
            _report(target)
            shutil.rmtree(target.folder)
            os._exit(0)

    limits = [f"-timeout={SECONDS}", "-rss_limit_mb=0", f"-max_len={LONGEST}", "-len_control=0", f"-seed={seed}"]
    inputs, rng = target.folder / "inputs", random.Random(seed)
    inputs.mkdir()
    for number in range(FIRST_INPUTS):
        (inputs / str(number)).write_bytes(rng.randbytes(rng.randrange(LONGEST)))
    atheris.Setup([sys.argv[0], *limits, str(inputs)], check)
    atheris.Fuzz()


def _report(target: Target) -> None:
    for outcome, count in sorted(target.outcomes.items()):
        print(f"{outcome:30} {count:9}")
    print(f"{'inputs':30} {target.outcomes.total():9}", flush=True)


if __name__ == "__main__":
    main()
