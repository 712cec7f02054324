"""The short form of `make fuzz`: always the same inputs, and whether it would notice what it looks for."""

import pytest

from tei_grpc.errors import StartupError, ValidationError
from tests.fuzz import checkpoints
from tests.fuzz.calls import METHODS, Call, fuzz_calls, open_stage
from tests.fuzz.checkpoints import fuzz_checkpoints, open_shelf
from tests.fuzz.tampering import Change, Tampering

EMBED = Call(0, "/tei.v1.Embed/Embed", [b"\x0a\x05hello"])
TAMPERING = Tampering(base=0, file=0, changes=[Change([0], "set", None)], length=None, edits=[])


@pytest.fixture(scope="module")
def stage(tmp_path_factory):
    with open_stage(tmp_path_factory.mktemp("stage")) as opened:
        yield opened


@pytest.fixture(scope="module")
def shelf(tmp_path_factory):
    with open_shelf(tmp_path_factory.mktemp("shelf")) as opened:
        yield opened


def test_calls_of_any_bytes_end_cleanly(stage):
    fuzz_calls(stage, examples=200, variants=20)()
    assert {"OK", "INVALID_ARGUMENT", "FAILED_PRECONDITION", "INTERNAL"} <= set(stage.outcomes)


def test_every_method_is_called(stage):
    stage.check([EMBED._replace(method=method) for method in METHODS])
    assert len([method for method in METHODS if method.startswith("/tei.v1.")]) == 17


def test_checkpoints_are_sound_before_they_are_tampered_with(shelf):
    shelf.check_sound()


def test_checkpoints_that_were_tampered_with_load_or_are_refused_cleanly(shelf):
    fuzz_checkpoints(shelf, examples=200)()
    assert {"loaded", "refused"} <= set(shelf.outcomes)


@pytest.mark.parametrize("error", [RuntimeError("no"), MemoryError()])
def test_error_that_nobody_foresaw_in_a_call_is_noticed(stage, monkeypatch, error):
    def fail(*_):
        raise error

    monkeypatch.setattr("tei_grpc.engine.validation.check_input", fail)
    with pytest.raises(AssertionError, match="Internal error, id"):
        stage.check([EMBED])


def test_text_from_the_inside_is_noticed(stage, monkeypatch):
    def fail(*_):
        raise ValidationError("File '/usr/lib/site-packages/x'")

    monkeypatch.setattr("tei_grpc.engine.validation.check_input", fail)
    with pytest.raises(AssertionError, match="site-packages"):
        stage.check([EMBED])


def test_call_that_hangs_is_noticed(stage, monkeypatch):
    monkeypatch.setattr("tests.fuzz.calls.SECONDS", 0.05)
    monkeypatch.setattr("tests.fuzz.calls.AtOnce.submit", lambda *_: None)
    with pytest.raises(AssertionError, match="hung"):
        stage.check([EMBED])


@pytest.mark.parametrize("error", [TypeError("no"), MemoryError(), StartupError("Traceback (most recent call last)")])
def test_unclean_error_of_a_checkpoint_is_noticed(shelf, monkeypatch, error):
    def fail(*_):
        raise error

    monkeypatch.setattr(checkpoints, "read_model_config", fail)
    with pytest.raises((TypeError, MemoryError, AssertionError)):
        shelf.check(TAMPERING)
