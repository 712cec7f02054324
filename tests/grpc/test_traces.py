"""Traces, from the caller's span to a collector."""

import asyncio
import time
from collections.abc import Iterator
from itertools import pairwise

import grpc
import pytest
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from tei_grpc.pb import tei_pb2, tei_pb2_grpc
from tests.collector import Collector, Received, collecting
from tests.grpc.conftest import serve_fake, until, write_checkpoint

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
RECORDED = (("traceparent", f"00-{TRACE}-{PARENT}-01"), ("tracestate", "vendor=1"))
SKIPPED = (("traceparent", f"00-{TRACE}-{PARENT}-00"),)
STAGES = ["tokenize", "queue", "inference"]


@pytest.fixture(autouse=True)
def prompt_export(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")


@pytest.fixture
def collector() -> Iterator[Collector]:
    with collecting() as collector:
        yield collector


def servers(received: list[Received]) -> list[Received]:
    return [each for each in received if each.span.kind == Span.SPAN_KIND_SERVER]


def below(received: list[Received], parent: Received) -> list[Received]:
    children = [each for each in received if each.span.parent_span_id == parent.span.span_id]
    return sorted(children, key=lambda each: (each.span.start_time_unix_nano, STAGES.index(each.span.name)))


async def wait_for_spans(collector: Collector, count: int) -> list[Received]:
    return await asyncio.to_thread(collector.wait_for_spans, count)


async def test_unary_call_joins_the_trace_of_its_caller(serve, collector):
    before = time.time_ns()
    async with serve(otlp_endpoint=collector.url) as served:
        await served.embed.Embed(tei_pb2.EmbedRequest(inputs="w0 w1"), metadata=RECORDED)
        received = await wait_for_spans(collector, 4)
    [request] = servers(received)
    assert request.service == "text-embeddings-inference.server"
    assert (request.span.trace_id.hex(), request.span.parent_span_id.hex()) == (TRACE, PARENT)
    assert (request.span.name, request.span.trace_state) == ("embed", "vendor=1")
    assert before < request.span.start_time_unix_nano < request.span.end_time_unix_nano < time.time_ns()
    assert request.attributes["gen_ai.usage.input_tokens"] == 4
    assert request.attributes["gen_ai.request.model"] == served.engine.info.model_id
    assert request.attributes["tei.method"] == "single"


async def test_stages_follow_each_other_below_the_request(serve, collector):
    async with serve(otlp_endpoint=collector.url) as served:
        await served.embed.Embed(tei_pb2.EmbedRequest(inputs="w0 w1"), metadata=RECORDED)
        received = await wait_for_spans(collector, 4)
    [request] = servers(received)
    stages = below(received, request)
    assert [each.span.name for each in stages] == STAGES
    for one, following in pairwise(stages):
        assert one.span.end_time_unix_nano == following.span.start_time_unix_nano
    assert stages[2].attributes == {"tei.batch_size": 1}


async def test_every_message_of_a_stream_joins_the_trace_of_the_caller(serve, collector):
    async with serve(otlp_endpoint=collector.url) as served:
        stream = served.embed.EmbedStream(metadata=RECORDED)
        for _ in range(3):
            await stream.write(tei_pb2.EmbedRequest(inputs="w0"))
        await stream.done_writing()
        assert len([reply async for reply in stream]) == 3
        received = await wait_for_spans(collector, 12)
    assert {each.span.trace_id.hex() for each in received} == {TRACE}
    assert [each.span.parent_span_id.hex() for each in servers(received)] == [PARENT] * 3


async def test_batch_size_says_how_many_ran_together(serve, collector):
    async with serve(otlp_endpoint=collector.url) as served:
        served.runner.gate.clear()
        calls = [served.embed.Embed(tei_pb2.EmbedRequest(inputs="w0"))]
        await asyncio.to_thread(served.runner.running.wait)
        calls += [served.embed.Embed(tei_pb2.EmbedRequest(inputs="w0")) for _ in range(3)]
        await until(lambda: served.device.waiting == 3)
        served.runner.gate.set()
        await asyncio.gather(*calls)
        received = await wait_for_spans(collector, 16)
    sizes = [each.attributes["tei.batch_size"] for each in received if each.span.name == "inference"]
    assert sorted(sizes) == [1, 3, 3, 3]


async def test_texts_of_a_rerank_call_have_stages_below_one_request(tmp_path, collector):
    reranker = write_checkpoint(tmp_path, "BertForSequenceClassification", id2label={"0": "LABEL_0"})
    async with serve_fake(reranker, otlp_endpoint=collector.url) as served:
        request = tei_pb2.RerankRequest(query="w0", texts=["w1", "w2"])
        await tei_pb2_grpc.RerankStub(served.channel).Rerank(request, metadata=RECORDED)
        received = await wait_for_spans(collector, 7)
    [request] = servers(received)
    assert (request.span.name, request.attributes["tei.inputs"], request.span.trace_id.hex()) == ("rerank", 2, TRACE)
    assert sorted(each.span.name for each in below(received, request)) == sorted(STAGES * 2)


async def test_failed_request_says_why_and_nothing_of_its_input(serve, collector):
    async with serve(otlp_endpoint=collector.url) as served:
        with pytest.raises(grpc.aio.AioRpcError):
            await served.embed.Embed(tei_pb2.EmbedRequest(inputs="MARKED", prompt_name="MARKED"))
        [request] = await wait_for_spans(collector, 1)
    assert request.span.status.code == Status.STATUS_CODE_ERROR
    assert request.attributes["error.type"] == "validation"
    assert b"MARKED" not in request.span.SerializeToString()


async def test_caller_decides_what_is_sampled(serve, collector):
    async with serve(otlp_endpoint=collector.url) as served:
        await served.embed.Embed(tei_pb2.EmbedRequest(inputs="w0"), metadata=SKIPPED)
        await served.embed.Embed(tei_pb2.EmbedRequest(inputs="w0"), metadata=RECORDED)
        received = await wait_for_spans(collector, 4)
    assert len(servers(received)) == 1


async def test_sampling_is_that_of_the_environment(serve, collector, monkeypatch):
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_traceidratio")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", "0")
    async with serve(otlp_endpoint=collector.url) as served:
        await served.embed.Embed(tei_pb2.EmbedRequest(inputs="w0"))
        await served.embed.Embed(tei_pb2.EmbedRequest(inputs="w0"), metadata=RECORDED)
        received = await wait_for_spans(collector, 4)
    assert [each.span.trace_id.hex() for each in servers(received)] == [TRACE]


async def test_sampler_that_asks_no_parent_overrules_the_caller(serve, collector, monkeypatch):
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "always_on")
    async with serve(otlp_endpoint=collector.url) as served:
        await served.embed.Embed(tei_pb2.EmbedRequest(inputs="w0"), metadata=SKIPPED)
        received = await wait_for_spans(collector, 4)
    assert [each.span.trace_id.hex() for each in servers(received)] == [TRACE]


async def test_fraction_of_traces_is_chosen_by_their_ids(serve, collector, monkeypatch):
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "traceidratio")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", "0.5")
    async with serve(otlp_endpoint=collector.url) as served:
        for _ in range(200):
            await served.embed.Embed(tei_pb2.EmbedRequest(inputs="w0"))
        await asyncio.to_thread(served.traces.close)
    ids = [each.span.trace_id for each in servers(collector.received)]
    assert 60 < len(set(ids)) == len(ids) < 140  # five standard deviations and more
    assert max(int.from_bytes(id[8:]) for id in ids) < 2**63


@pytest.mark.parametrize("value", ["", "00-zz-zz-01", "x" * 5000, "00-" + "0" * 32 + "-" + "0" * 16 + "-01"])
async def test_trace_context_that_makes_no_sense_begins_a_trace(serve, collector, value):
    async with serve(otlp_endpoint=collector.url) as served:
        await served.embed.Embed(tei_pb2.EmbedRequest(inputs="w0"), metadata=(("traceparent", value),))
        received = await wait_for_spans(collector, 4)
    [request] = servers(received)
    assert request.span.parent_span_id == b""
    assert request.span.trace_id != bytes(16)


async def test_client_server_and_collector_tell_one_story(serve, collector):
    client = TracerProvider(resource=Resource.create({"service.name": "client"}), shutdown_on_exit=False)
    client.add_span_processor(SimpleSpanProcessor(OTLPSpanExporter(endpoint=collector.url)))
    async with serve(otlp_endpoint=collector.url, otlp_service_name="ours") as served:
        span = client.get_tracer("test").start_span("search")
        carrier: dict[str, str] = {}
        TraceContextTextMapPropagator().inject(carrier, trace.set_span_in_context(span))
        await served.embed.Embed(tei_pb2.EmbedRequest(inputs="w0"), metadata=tuple(carrier.items()))
        await asyncio.to_thread(span.end)
        received = await wait_for_spans(collector, 5)
    await asyncio.to_thread(client.shutdown)
    [theirs] = [each for each in received if each.service == "client"]
    [ours] = servers(received)
    assert ours.service == "ours"
    assert (ours.span.trace_id, ours.span.parent_span_id) == (theirs.span.trace_id, theirs.span.span_id)
    assert theirs.span.start_time_unix_nano < ours.span.start_time_unix_nano
    assert ours.span.end_time_unix_nano < theirs.span.end_time_unix_nano


async def test_collector_that_does_not_answer_holds_up_no_call_and_no_memory(serve, collector, monkeypatch):
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "64")
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "16")
    collector.gate.clear()
    async with serve(otlp_endpoint=collector.url) as served:
        async with asyncio.timeout(20):
            for _ in range(100):
                await served.embed.Embed(tei_pb2.EmbedRequest(inputs="w0"))
        collector.gate.set()
    assert 0 < len(collector.received) <= 64 + 16


async def test_collector_that_is_not_there_holds_up_neither_calls_nor_the_end(serve):
    with collecting() as gone:
        url = gone.url
    started = time.monotonic()
    async with serve(otlp_endpoint=url) as served:
        assert (await served.embed.Embed(tei_pb2.EmbedRequest(inputs="w0"))).embeddings
    assert time.monotonic() - started < 50
