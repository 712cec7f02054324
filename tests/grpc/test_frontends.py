"""Front-ends: what callers of one server get, over several processes."""

import asyncio
import signal

import grpc
import psutil
import pytest
import pytest_asyncio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tei_grpc.errors import InferenceError
from tei_grpc.pb import tei_pb2, tei_pb2_grpc
from tests import fakes
from tests.collector import collecting
from tests.grpc.conftest import until, write_checkpoint
from tests.grpc.frontends import OWN_CONNECTION, serve_by_frontends

pytestmark = pytest.mark.asyncio(loop_scope="module")

Code = grpc.StatusCode
Status = health_pb2.HealthCheckResponse
PERMITS = 8


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fronted(tmp_path_factory):
    model = write_checkpoint(tmp_path_factory.mktemp("model"), "BertModel")
    async with serve_by_frontends(model, max_concurrent_requests=PERMITS) as running:
        yield running


@pytest_asyncio.fixture(loop_scope="module")
async def pair(fronted):
    """A stub for each of the two front-ends; at the end nothing is left of the test."""
    async with fronted.channels() as channels:
        yield [tei_pb2_grpc.EmbedStub(channel) for channel in channels.values()]
    fronted.runner.gate.set()
    await until(lambda: fronted.device.free_permits == PERMITS)
    fronted.runner.running.clear()


def request(text="w0"):
    return tei_pb2.EmbedRequest(inputs=text)


async def hold(fronted, stub):
    """A call that the model works on until the gate opens."""
    fronted.runner.running.clear()
    fronted.runner.gate.clear()
    call = stub.Embed(request())
    await asyncio.to_thread(fronted.runner.running.wait, 10)
    return call


async def test_streams_of_both_are_answered_in_order_beside_each_other(pair):
    requests = [request(f"w{i % 200} w{i // 200}") for i in range(1000)]
    calls = [stub.EmbedStream(iter(requests)) for stub in pair]
    alone = [answer.embeddings async for answer in pair[0].EmbedStream(iter(requests))]
    for answers in await asyncio.gather(*[collect(call) for call in calls]):
        assert [answer.embeddings for answer in answers] == alone
    assert len({tuple(vector) for vector in alone}) == len(requests)


async def collect(call):
    return [answer async for answer in call]


async def test_permits_are_those_of_one_server(fronted, pair):
    held = await hold(fronted, pair[0])
    calls = [held, *(stub.Embed(request()) for _ in range(PERMITS) for stub in pair)]
    codes = asyncio.gather(*(call.code() for call in calls))
    await until(lambda: fronted.device.free_permits == 0)
    assert fronted.numbers("te_permits_in_use") == {"": PERMITS}
    await until(lambda: fronted.numbers("te_request_failure").get('{err="overloaded",method="single"}') == PERMITS + 1)
    fronted.runner.gate.set()
    codes = await codes
    assert codes.count(Code.OK) == PERMITS
    assert codes.count(Code.RESOURCE_EXHAUSTED) == PERMITS + 1


async def test_entry_of_a_caller_who_leaves_leaves_the_queue(fronted, pair):
    held = await hold(fronted, pair[0])
    call = pair[1].Embed(request())
    await until(lambda: fronted.device.waiting == 1)
    call.cancel()
    await until(lambda: fronted.device.waiting == 0)
    await until(lambda: fronted.device.free_permits == PERMITS - 1)
    fronted.runner.gate.set()
    assert await held.code() is Code.OK


async def test_deadline_ends_a_call_and_frees_its_permit(fronted, pair):
    held = await hold(fronted, pair[0])
    assert await pair[1].Embed(request(), timeout=0.2).code() is Code.DEADLINE_EXCEEDED
    await until(lambda: fronted.device.free_permits == PERMITS - 1)
    assert fronted.device.waiting == 0
    fronted.runner.gate.set()
    assert await held.code() is Code.OK


async def test_stream_that_waits_for_permits_leaves_none_behind(fronted, pair):
    held = await hold(fronted, pair[0])
    stream = pair[1].EmbedStream(iter([request()] * 50))
    await until(lambda: fronted.device.free_permits == PERMITS // 4)  # the last quarter is for unary calls
    stream.cancel()
    await until(lambda: fronted.device.free_permits == PERMITS - 1)
    fronted.runner.gate.set()
    assert len(await collect(pair[1].EmbedStream(iter([request()] * 50)))) == 50
    assert await held.code() is Code.OK


async def test_error_of_one_entry_keeps_its_kind_and_text(fronted, pair):
    fronted.runner.answer = lambda entry: InferenceError("not finite") if len(entry) > 3 else fakes.answer(entry)
    try:
        call = pair[0].Embed(request("w1 w2"))
        assert await call.code() is Code.INTERNAL
        assert (await call.details()).startswith("not finite, id ")
        assert await pair[1].Embed(request("w1")).code() is Code.OK
    finally:
        fronted.runner.answer = fakes.answer


async def test_metrics_are_sums_over_both(fronted, pair):
    before = fronted.numbers("te_request_success").get('{method="single"}', 0)
    lengths = fronted.numbers("te_request_input_length_sum").get("", 0)
    for stub, calls in zip(pair, (3, 4), strict=True):
        await asyncio.gather(*(stub.Embed(request("w1 w2")) for _ in range(calls)))
    assert fronted.numbers("te_request_success")['{method="single"}'] == before + 7
    assert fronted.numbers("te_request_input_length_sum")[""] == lengths + 7 * 4


async def test_every_front_end_tells_when_the_device_does_not_run(fronted, pair):
    async with fronted.channels() as channels:
        stubs = [health_pb2_grpc.HealthStub(channel) for channel in channels.values()]
        watches = [stub.Watch(health_pb2.HealthCheckRequest()) for stub in stubs]
        for status, healthy in ((Status.SERVING, None), (Status.NOT_SERVING, False), (Status.SERVING, True)):
            if healthy is not None:
                fronted.server.exchange.follow(healthy)
            assert [(await asyncio.wait_for(watch.read(), 10)).status for watch in watches] == [status, status]
        for watch in watches:
            watch.cancel()


async def test_front_ends_load_no_torch(fronted, pair):
    assert len(fronted.pids) == 2
    for pid in fronted.pids:
        assert not [each.path for each in psutil.Process(pid).memory_maps() if "torch" in each.path]


async def test_killed_front_end_costs_its_own_calls_only_and_comes_back(fronted, pair):
    async with fronted.channels() as channels:
        (victim, first), (_, second) = channels.items()
        frontend = next(each for each in fronted.server.frontends if each.pid == victim)
        stubs = [tei_pb2_grpc.EmbedStub(each) for each in (first, second)]
        held = await hold(fronted, stubs[1])
        lost = [stubs[0].Embed(request()) for _ in range(3)]
        stream = stubs[0].EmbedStream(iter([request()] * 20))
        kept = stubs[1].Embed(request())
        await until(lambda: fronted.device.free_permits <= PERMITS // 4)
        psutil.Process(victim).send_signal(signal.SIGKILL)
        assert {await call.code() for call in (*lost, stream)} == {Code.UNAVAILABLE}
        await until(lambda: fronted.device.free_permits == PERMITS - 2)
        assert fronted.device.waiting == 1
        fronted.runner.gate.set()
        assert [await held.code(), await kept.code()] == [Code.OK, Code.OK]
    while frontend.pid == victim or not frontend.connection.ready.done():
        async with grpc.aio.insecure_channel(fronted.address, options=OWN_CONNECTION) as channel:
            assert await tei_pb2_grpc.InfoStub(channel).Info(tei_pb2.InfoRequest()).code() is Code.OK
    async with fronted.channels() as channels:
        assert victim not in channels
        for channel in channels.values():
            assert await tei_pb2_grpc.EmbedStub(channel).Embed(request()).code() is Code.OK


async def test_drain_answers_what_is_under_way_and_loses_nothing(tmp_path):
    model = write_checkpoint(tmp_path, "BertModel")
    async with serve_by_frontends(model, shutdown_delay=0.2) as fronted, fronted.channels() as channels:
        stubs = [tei_pb2_grpc.EmbedStub(channel) for channel in channels.values()]
        held = await hold(fronted, stubs[0])
        calls = [held, *(stub.Embed(request()) for stub in stubs for _ in range(20))]
        await until(lambda: fronted.device.waiting == 40)
        watch = health_pb2_grpc.HealthStub(next(iter(channels.values()))).Watch(health_pb2.HealthCheckRequest())
        assert (await watch.read()).status == Status.SERVING
        stopping = asyncio.create_task(fronted.server.stop())
        assert (await watch.read()).status == Status.NOT_SERVING
        fronted.runner.gate.set()
        assert {await call.code() for call in calls} == {Code.OK}
        assert await asyncio.wait_for(stopping, 20)
        assert [frontend.ended.result() for frontend in fronted.server.frontends] == [0, 0]


async def test_keys_are_read_anew_in_all_and_health_has_its_port(tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("old\n")
    options = {"api_key_file": str(keys), "health_port": 0}
    async with serve_by_frontends(write_checkpoint(tmp_path, "BertModel"), **options) as fronted:
        async with fronted.channels() as channels:
            stubs = [tei_pb2_grpc.InfoStub(channel) for channel in channels.values()]
            assert await codes_of(stubs, "old") == {Code.OK}
            keys.write_text("new\n")
            fronted.server.reload()
            async with asyncio.timeout(10):
                while await codes_of(stubs, "new") != {Code.OK}:
                    await asyncio.sleep(0.01)
            assert await codes_of(stubs, "old") == {Code.UNAUTHENTICATED}
        async with grpc.aio.insecure_channel(fronted.health_address) as channel:
            answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
            assert answer.status == Status.SERVING
            assert await tei_pb2_grpc.InfoStub(channel).Info(tei_pb2.InfoRequest()).code() is Code.UNIMPLEMENTED


async def codes_of(stubs, key):
    metadata = [("authorization", f"Bearer {key}")]
    return {await stub.Info(tei_pb2.InfoRequest(), metadata=metadata).code() for stub in stubs}


async def test_traces_come_from_every_front_end(tmp_path):
    with collecting() as collector:
        serving = serve_by_frontends(write_checkpoint(tmp_path, "BertModel"), otlp_endpoint=collector.url)
        async with serving as fronted, fronted.channels() as channels:
            for channel in channels.values():
                await tei_pb2_grpc.EmbedStub(channel).Embed(request())
        received = await asyncio.to_thread(collector.wait_for_spans, 8)  # sent by the end at the latest
    assert sorted(each.span.name for each in received) == sorted(["embed", "tokenize", "queue", "inference"] * 2)
