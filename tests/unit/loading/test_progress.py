"""Progress: what is told, where, and when it is not worth telling."""

import logging

import pytest

from tei_grpc.loading import progress
from tei_grpc.loading.progress import Progress


@pytest.fixture(autouse=True)
def heard(caplog):
    caplog.set_level(logging.INFO)
    return caplog


def go(steps: int) -> None:
    counter = Progress("Loading", steps)
    for _ in range(steps):
        counter.advance(1)


def test_log_has_a_line_per_quarter(caplog, monkeypatch):
    monkeypatch.setattr(progress, "PATIENCE", 0)
    go(200)
    assert caplog.messages == ["Loading: 25 %", "Loading: 50 %", "Loading: 75 %", "Loading: 100 %"]


def test_what_is_done_soon_is_not_talked_about(caplog):
    go(200)
    assert caplog.messages == []


def test_terminal_has_one_line_that_changes(caplog, capsys, monkeypatch):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    go(2)
    assert capsys.readouterr().err == "\rLoading: 50 %\rLoading: 100 %\n"
    assert caplog.messages == []


def test_nothing_to_do_is_no_error():
    Progress("Loading", 0).advance(0)


def test_download_shows_the_librarys_bars_on_a_terminal(monkeypatch):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    assert progress.download_bars() is None


def test_download_is_told_in_lines_elsewhere(caplog, capsys, monkeypatch):
    monkeypatch.setattr(progress, "PATIENCE", 0)
    with progress.download_bars()(total=4_000_000, unit="B", mininterval=0, disable=None) as bar:
        bar.update(1_000_000)
        bar.update(3_000_000)
    assert caplog.messages[1:3] == ["Downloading: 1 of 4 MB", "Downloading: 4 of 4 MB"]
    assert capsys.readouterr().err == ""


def test_number_of_files_is_not_told(caplog, monkeypatch):
    monkeypatch.setattr(progress, "PATIENCE", 0)
    with progress.download_bars()(total=6, mininterval=0) as bar:
        bar.update(6)
    assert caplog.messages == []
