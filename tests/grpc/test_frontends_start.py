"""Front-ends that die while the model loads."""

import asyncio
import sys

import grpc
import psutil
import pytest

from tei_grpc.errors import StartupError
from tei_grpc.frontends import frontend
from tei_grpc.pb import tei_pb2, tei_pb2_grpc
from tests.grpc.conftest import until, write_checkpoint
from tests.grpc.frontends import listen_by_frontends

Code = grpc.StatusCode


async def test_front_end_that_dies_while_the_model_loads_is_replaced(tmp_path):
    async with listen_by_frontends(write_checkpoint(tmp_path, "BertModel")) as fronted:
        fronted.runner.gate.clear()
        fronted.runner.warm_up = fronted.runner.gate.wait
        loading = asyncio.create_task(fronted.server.load(fronted.addresses))
        victim = fronted.server.frontends[0]
        before = victim.pid
        psutil.Process(before).kill()
        await until(lambda: victim.pid != before)
        fronted.runner.gate.set()
        await loading
        async with fronted.channels() as channels:
            assert before not in channels
            for channel in channels.values():
                assert await tei_pb2_grpc.EmbedStub(channel).Embed(tei_pb2.EmbedRequest(inputs="w0")).code() is Code.OK


async def test_front_end_that_dies_again_and_again_while_the_model_loads_ends_the_start(tmp_path, monkeypatch):
    async with listen_by_frontends(write_checkpoint(tmp_path, "BertModel")) as fronted:
        fronted.runner.gate.clear()
        fronted.runner.warm_up = fronted.runner.gate.wait
        monkeypatch.setattr(frontend, "COMMAND", (sys.executable, "-c", "raise SystemExit(3)"))
        loading = asyncio.create_task(fronted.server.load(fronted.addresses))
        psutil.Process(fronted.pids[1]).kill()
        with pytest.raises(StartupError, match="A front-end ended with exit code 3 while it started"):
            await asyncio.wait_for(loading, 20)
