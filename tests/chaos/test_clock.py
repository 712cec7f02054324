"""A clock that jumps: by NTP, by hand, or with the machine's sleep. Debian's libfaketime moves it for one process."""

import ast
from pathlib import Path

import grpc
import pytest

import tei_grpc
from tei_grpc.pb import tei_pb2, tei_pb2_grpc
from tests.chaos.bystander import Bystander, connect
from tests.chaos.sick import sick
from tests.needs import need

LIBRARIES = "*/faketime/libfaketimeMT.so.1"  # below /usr/lib, by the architecture
WALL_CLOCK = {("time", "time"), ("time", "time_ns"), ("datetime", "now"), ("datetime", "utcnow")}
TELL_THE_TIME = {"engine/request.py", "logs/handler.py"}  # when a span or a line was


def reads_wall_clock(path: Path) -> bool:
    names = (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute))
    return any(isinstance(node.value, ast.Name) and (node.value.id, node.attr) in WALL_CLOCK for node in names)


def test_only_log_lines_and_spans_know_the_time_of_day():
    root = Path(tei_grpc.__file__).parent
    assert {str(path.relative_to(root)) for path in root.rglob("*.py") if reads_wall_clock(path)} <= TELL_THE_TIME


@pytest.fixture
def faketime() -> str:
    found = [str(path) for path in Path("/usr/lib").glob(LIBRARIES)]
    need(found, "libfaketime is not installed: apt-get install libfaketime")
    return found[0]


@pytest.mark.parametrize("jump", ["+1d", "-1d"])
async def test_jump_of_the_clock_neither_ends_nor_prolongs_a_call(jump: str, faketime: str, tmp_path: Path):
    offset = tmp_path / "offset"
    offset.write_text("+0")
    environment = {"LD_PRELOAD": faketime, "FAKETIME_TIMESTAMP_FILE": str(offset), "FAKETIME_NO_CACHE": "1"}
    async with (
        sick(**environment, FAKETIME_DONT_FAKE_MONOTONIC="1", RUNNER_TIMEOUT="60") as server,
        connect(server.address) as channel,
    ):
        stub = tei_pb2_grpc.EmbedStub(channel)
        begun = (await server.metrics())["te_request_count"]
        held = stub.Embed(tei_pb2.EmbedRequest(inputs="w195"), timeout=60)
        await server.is_busy()
        waiting = stub.Embed(tei_pb2.EmbedRequest(inputs="w1"), timeout=60)
        impatient = stub.Embed(tei_pb2.EmbedRequest(inputs="w1"), timeout=1)
        await server.has_begun(begun + 3)
        offset.write_text(jump)
        assert await impatient.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        server.let_go()
        assert [await call.code() for call in (held, waiting)] == [grpc.StatusCode.OK, grpc.StatusCode.OK]
        assert await Bystander.is_serving(channel)
        assert await server.lost() == 0
