"""The books: a request ends as exactly one of success, failure or dropped."""

import asyncio
import logging
import time

import pytest

from tei_grpc.engine.request import Books, Request
from tei_grpc.errors import (
    DeadlineError,
    InferenceError,
    ModelTypeError,
    OverloadedError,
    TeiError,
    TokenizationError,
    UnavailableError,
    ValidationError,
)
from tei_grpc.metrics import Metrics
from tei_grpc.types import Caller, Kind, Metadata
from tests.samples import endings, sample

METADATA = Metadata(4, 3, 4_000_000, 1_000_000, 2_000_000, 500_000)


async def end_with(error: BaseException, caller: Caller | None = None) -> Metrics:
    metrics = Metrics()
    with pytest.raises(type(error)), Request(Books(metrics), caller or Caller(), Kind.EMBED):
        raise error
    return metrics


async def test_answer_is_a_success():
    metrics = Metrics()
    with Request(Books(metrics), Caller(), Kind.EMBED) as request:
        request.succeed(METADATA)
    assert endings(metrics) == {"single": 1}


@pytest.mark.parametrize(
    "error",
    [
        ValidationError("x"),
        OverloadedError(),
        ModelTypeError("x"),
        TokenizationError("x"),
        UnavailableError("x"),
        InferenceError("x"),
    ],
)
async def test_error_is_a_failure_of_its_kind(error: TeiError):
    assert endings(await end_with(error)) == {error.kind.value: 1}


async def test_unforeseen_error_is_a_failure_of_inference():
    assert endings(await end_with(KeyError("x"))) == {"inference": 1}


async def test_passed_deadline_is_dropped_as_expired():
    assert endings(await end_with(DeadlineError())) == {"expired": 1}


async def cancelled(caller: Caller) -> Metrics:
    metrics = Metrics()

    async def work() -> None:
        with Request(Books(metrics), caller, Kind.EMBED):
            await asyncio.Event().wait()

    task = asyncio.ensure_future(work())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    return metrics


async def test_caller_who_left_is_dropped_as_cancelled():
    assert endings(await cancelled(Caller())) == {"cancelled": 1}


async def test_caller_who_left_in_time_is_dropped_as_cancelled():
    assert endings(await cancelled(Caller(deadline_ns=time.monotonic_ns() + 10**12))) == {"cancelled": 1}


async def test_caller_cancelled_by_its_deadline_is_dropped_as_expired():
    assert endings(await cancelled(Caller(deadline_ns=1))) == {"expired": 1}


async def test_future_cancelled_inside_the_server_is_an_inference_error():
    metrics = Metrics()
    future = asyncio.get_running_loop().create_future()
    future.cancel()
    with pytest.raises(InferenceError, match="Inference failed"), Request(Books(metrics), Caller(), Kind.EMBED):
        await future
    assert endings(metrics) == {"inference": 1}


@pytest.mark.parametrize(
    ("caller", "method", "expected"),
    [(Caller(), None, "single"), (Caller(waits=True), None, "stream"), (Caller(), "batch", "batch")],
)
async def test_request_is_counted_by_how_it_came(caller, method, expected):
    metrics = Metrics()
    with Request(Books(metrics), caller, Kind.EMBED, method) as request:
        request.succeed(METADATA)
    assert sample(metrics, "te_request_count_total", method=expected) == 1
    assert endings(metrics) == {expected: 1}


async def test_success_is_logged_with_what_was_asked_how_and_at_what_cost(caplog):
    with (
        caplog.at_level(logging.INFO, "tei_grpc"),
        Request(Books(Metrics()), Caller(request_id="x"), "rerank") as request,
    ):
        request.succeed(METADATA)
    (record,) = caplog.records
    assert (record.name, record.levelname, record.getMessage()) == ("tei_grpc.engine.request", "INFO", "Success")
    assert (record.filename, record.funcName) == ("request.py", "succeed")
    assert record.span == {
        "kind": "rerank",
        "method": "single",
        "request_id": "x",
        "total_time": "4.000ms",
        "tokenization_time": "1.000ms",
        "queue_time": "2.000ms",
        "inference_time": "0.500ms",
        "compute_chars": 4,
        "compute_tokens": 3,
    }


async def test_failure_is_logged_with_its_text(caplog):
    with caplog.at_level(logging.ERROR, "tei_grpc"):
        await end_with(ValidationError("`dimensions` should be positive"))
    assert [record.getMessage() for record in caplog.records] == [
        "Input validation error: `dimensions` should be positive"
    ]


async def test_text_of_an_unforeseen_error_is_not_logged_here(caplog):
    with caplog.at_level(logging.ERROR, "tei_grpc"):
        await end_with(KeyError("secret"))
    assert "secret" not in caplog.text
