import asyncio

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tei_grpc.commands import health
from tei_grpc.pb import tei_pb2
from tests.grpc.conftest import serve_fake, write_checkpoint

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
SERVICE_UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
NAMES = ("", "tei.v1.Info", "tei.v1.Tokenize", "tei.v1.Embed", "tei.v1.Predict", "tei.v1.Rerank")
LIVENESS = "liveness"
EMBED = "/tei.v1.Embed/Embed"


def stub_of(served):
    return health_pb2_grpc.HealthStub(served.channel)


def request(service=""):
    return health_pb2.HealthCheckRequest(service=service)


async def serving_names(served):
    replies = {name: await stub_of(served).Check(request(name)) for name in NAMES}
    return {name for name, reply in replies.items() if reply.status == SERVING}


async def read_status(call):
    return (await asyncio.wait_for(call.read(), 10)).status


async def test_embedding_model_serves_embed(served):
    assert await serving_names(served) == {"", "tei.v1.Info", "tei.v1.Tokenize", "tei.v1.Embed"}


@pytest.mark.parametrize(
    ("labels", "services"),
    [(1, {"tei.v1.Predict", "tei.v1.Rerank"}), (3, {"tei.v1.Predict"})],
)
async def test_scoring_models_serve_what_fits_them(tmp_path, labels, services):
    model = write_checkpoint(tmp_path, "BertForSequenceClassification", num_labels=labels)
    async with serve_fake(model) as served:
        assert await serving_names(served) == {"", "tei.v1.Info", "tei.v1.Tokenize"} | services


async def test_check_of_an_unknown_name_is_not_found(served):
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub_of(served).Check(request("nope"))
    assert (caught.value.code(), caught.value.details()) == (grpc.StatusCode.NOT_FOUND, "service not registered")


async def test_list_tells_all_at_once(served):
    listed = (await stub_of(served).List(health_pb2.HealthListRequest())).statuses
    serving = {LIVENESS, *await serving_names(served)}
    assert {name: reply.status for name, reply in listed.items()} == {
        name: SERVING if name in serving else NOT_SERVING for name in (*NAMES, LIVENESS)
    }


async def test_nothing_serves_while_the_model_loads(serve):
    async with serve(load=False) as served:
        assert await serving_names(served) == set()


async def test_watch_sends_the_present_status_then_changes(serve):
    async with serve(load=False) as served:
        call = stub_of(served).Watch(request("tei.v1.Embed"))
        assert await read_status(call) == NOT_SERVING
        await served.engine.start()
        assert await read_status(call) == SERVING


async def test_watch_is_silent_when_nothing_changes_for_its_service(serve):
    async with serve(load=False) as served:
        call = stub_of(served).Watch(request("tei.v1.Rerank"))
        assert await read_status(call) == NOT_SERVING
        await served.engine.start()
        await stub_of(served).Check(request())
        served.server._health.end()
        assert await asyncio.wait_for(call.read(), 10) is grpc.aio.EOF


async def test_watch_of_an_unknown_name_says_so_and_stays(served):
    call = stub_of(served).Watch(request("nope"))
    assert await read_status(call) == SERVICE_UNKNOWN
    await stub_of(served).Check(request())
    assert not call.done()


async def test_watch_ends_with_not_serving_when_the_server_drains(serve):
    async with serve() as served:
        call = stub_of(served).Watch(request())
        assert await read_status(call) == SERVING
        stopping = asyncio.create_task(served.server.stop())
        assert await read_status(call) == NOT_SERVING
        assert await asyncio.wait_for(call.read(), 10) is grpc.aio.EOF
        assert await call.code() is grpc.StatusCode.OK
        await stopping


async def test_sick_device_turns_everything_and_recovery_turns_it_back(served):
    served.engine._follow_device(False)
    assert await serving_names(served) == set()
    served.engine._follow_device(True)
    assert "tei.v1.Embed" in await serving_names(served)


async def is_live(served):
    return (await stub_of(served).Check(request(LIVENESS))).status == SERVING


async def test_liveness_holds_while_the_model_loads_and_serves(serve):
    async with serve(load=False) as served:
        assert await is_live(served)
        await served.engine.start()
        assert await is_live(served)


async def test_liveness_ends_with_the_device_and_comes_back_with_it(served):
    served.engine._follow_device(False)
    assert not await is_live(served)
    served.engine._follow_device(True)
    assert await is_live(served)


async def test_liveness_holds_while_calls_are_shed_and_while_the_server_drains(serve):
    async with serve(max_concurrent_requests=1, health_port=0, shutdown_grace=20) as served:
        served.runner.gate.clear()
        held = served.embed.Embed(tei_pb2.EmbedRequest(inputs="w0"))
        await asyncio.to_thread(served.runner.running.wait)
        assert await served.embed.Embed(tei_pb2.EmbedRequest(inputs="w0")).code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert await is_live(served)
        [health_address] = served.addresses.health
        async with grpc.aio.insecure_channel(health_address.local) as channel:
            probe = health_pb2_grpc.HealthStub(channel)
            watch = probe.Watch(request())
            assert await read_status(watch) == SERVING
            stopping = asyncio.create_task(served.server.stop())
            assert await read_status(watch) == NOT_SERVING
            assert (await probe.Check(request(LIVENESS))).status == SERVING
            served.runner.gate.set()
            assert (await held).embeddings
            await stopping


async def test_probe_is_answered_while_calls_are_shed(serve):
    async with serve(max_concurrent_requests=1) as served:
        served.runner.gate.clear()
        held = served.embed.Embed(tei_pb2.EmbedRequest(inputs="w0"))
        await asyncio.to_thread(served.runner.running.wait)
        shed = [served.embed.Embed(tei_pb2.EmbedRequest(inputs="w0")) for _ in range(100)]
        reply = await stub_of(served).Check(request(), timeout=1)
        assert reply.status == SERVING
        codes = {await call.code() for call in shed}
        served.runner.gate.set()
        assert codes == {grpc.StatusCode.RESOURCE_EXHAUSTED}
        assert (await held).embeddings


async def test_command_tells_serving_by_line_and_exit_code(served, capsys):
    assert await asyncio.to_thread(health.check, served.address, "tei.v1.Embed", 5.0) == 0
    assert await asyncio.to_thread(health.check, served.address, "tei.v1.Rerank", 5.0) == 1
    assert await asyncio.to_thread(health.check, served.address, "nope", 5.0) == 1
    assert [line.split(": ", 1)[1] for line in capsys.readouterr().out.splitlines()] == [
        "SERVING",
        "NOT_SERVING",
        "NOT_FOUND: service not registered",
    ]


def test_command_fails_when_nobody_listens(capsys):
    assert health.check("127.0.0.1:1", "", 5.0) == 1
    assert "UNAVAILABLE" in capsys.readouterr().out


async def test_probe_does_not_wait_behind_calls_that_came_before(served):
    served.runner.gate.clear()
    calls = [served.channel.unary_unary(EMBED)(b"\x0a\x02w0") for _ in range(400)]
    await stub_of(served).Check(request())
    begun = served.engine.config.max_concurrent_requests - served.device.free_permits
    served.runner.gate.set()
    assert {await call.code() for call in calls} == {grpc.StatusCode.OK}
    assert begun < 100
