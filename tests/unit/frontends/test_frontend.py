import socket

import pytest

from tei_grpc.config import Settings
from tei_grpc.errors import StartupError
from tei_grpc.frontends import frontend
from tei_grpc.frontends.exchange import Exchange
from tei_grpc.frontends.files import SharedFiles
from tei_grpc.frontends.frontend import Frontend
from tei_grpc.frontends.process import Job

FILES = SharedFiles(0, 1)


@pytest.mark.parametrize("command", ["/nonexistent", "/"])
async def test_process_that_cannot_be_started_is_a_startup_error_and_leaves_no_socket(monkeypatch, command):
    pair, made = socket.socketpair, []

    def remember(*arguments):
        made.append(pair(*arguments))
        return made[-1]

    monkeypatch.setattr(socket, "socketpair", remember)
    monkeypatch.setattr(frontend, "COMMAND", (command,))
    started = Frontend(Job(Settings.model_validate({"model_id": "m"}), 0, FILES), Exchange(0, 1))
    with pytest.raises(StartupError, match="A front-end could not be started: "):
        await started.start()
    assert made
    assert all(end.fileno() == -1 for ends in made for end in ends)


async def test_lack_of_sockets_is_a_startup_error(monkeypatch):
    def full():
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(socket, "socketpair", full)
    started = Frontend(Job(Settings.model_validate({"model_id": "m"}), 0, FILES), Exchange(0, 1))
    with pytest.raises(StartupError, match="A front-end could not be started: .*Too many open files"):
        await started.start()
