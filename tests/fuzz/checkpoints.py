"""Checkpoint directories with one file that somebody has tampered with: they load, or one clean error says why not."""

import asyncio
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import HealthCheck, given, settings

from tei_grpc.config import EngineConfig
from tei_grpc.engine.runner import Runner
from tei_grpc.engine.tokenizer import Tokenizer
from tei_grpc.errors import StartupError, TeiError
from tei_grpc.loading.model_config import read_model_config
from tei_grpc.types import Input
from tests.fuzz.bases import BASES, OPTIONS
from tests.fuzz.tampering import TAMPERINGS, Tampering, tamper

SECONDS = 60.0  # that one checkpoint may take to load, when others want the processor, too; it takes some milliseconds

SETTINGS = settings(derandomize=True, deadline=SECONDS * 1000, database=None, suppress_health_check=list(HealthCheck))

INSIDE = re.compile(r"Traceback|/site-packages/|/tei_grpc/|object at 0x")


class Shelf:
    """The checkpoints, each in a folder whose files are links; one is replaced while it is tampered with."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._contents = {base: _read_all(folder / "sound" / base) for base in BASES}
        self.outcomes: Counter[str] = Counter()
        for base, contents in self._contents.items():
            for name in contents:
                self._restore(base, name)

    def check(self, tampering: Tampering) -> None:
        """Fail unless the checkpoint loads and answers, or is refused by an error that is meant for its user."""
        base = list(BASES)[tampering.base % len(BASES)]
        contents = self._contents[base]
        name = sorted(contents)[tampering.file % len(contents)]
        tampered, content = self._folder / base / name, tamper(name, contents[name], tampering)
        tampered.unlink()
        tampered.write_bytes(content)
        try:
            self.outcomes[load(self._folder / base, OPTIONS.get(base, {}))] += 1
        finally:
            tampered.unlink()
            self._restore(base, name)

    def check_sound(self) -> None:
        """Fail unless all of them load as they are."""
        assert {base: load(self._folder / base, OPTIONS.get(base, {})) for base in BASES} == dict.fromkeys(
            BASES, "loaded"
        )

    def _restore(self, base: str, name: str) -> None:
        link = self._folder / base / name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(self._folder / "sound" / base / name)


def load(folder: Path, options: Mapping[str, object]) -> str:
    """Take the steps of a start, and of one request; say how it went. Raises what is no clean error."""
    config = EngineConfig.model_validate({"model_id": str(folder), "tokenization_workers": 1, **options})
    try:
        model = read_model_config(folder, config)
        tokenizer = Tokenizer(model, config)
        try:
            Runner(model, config).warm_up()
            for pair in (None, "x"):
                asyncio.run(tokenizer.encode(Input("hello world", pair, truncate=True)))
        finally:
            tokenizer.close()
    except StartupError as error:
        assert not INSIDE.search(error.message), error.message
        return "refused"
    except TeiError as error:
        assert not INSIDE.search(error.message), error.message
        return "loaded, without an answer"
    return "loaded"


@contextmanager
def open_shelf(folder: Path) -> Iterator[Shelf]:
    """All checkpoints, made in `folder`. One thread is enough for models of this size."""
    transformers.logging.disable_progress_bar()
    for base, make in BASES.items():
        make(folder / "sound" / base)
    threads = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        torch.set_num_threads(1)
        try:
            yield Shelf(folder)
        finally:
            torch.set_num_threads(threads)


def fuzz_checkpoints(shelf: Shelf, *, examples: int = 100) -> Any:
    """A hypothesis test over tampered checkpoints; hand its `fuzz_one_input` to a fuzzer, or call it."""

    @settings(SETTINGS, max_examples=examples)
    @given(TAMPERINGS)
    def check(tampering: Tampering) -> None:
        shelf.check(tampering)

    return check


def _read_all(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}
