"""Several servers behind one name: who gets calls, and when."""

import asyncio
from contextlib import AsyncExitStack

import pytest
from tei_client import RetryPolicy

from tests.clients.names import serve_names
from tests.e2e.servers import free_port
from tests.grpc.conftest import serve_fake, write_checkpoint

ONCE = RetryPolicy(attempts=1)
# gRPC asks the name server at most every 30 s, unless told otherwise
QUICK = (("grpc.dns_min_time_between_resolutions_ms", 50), ("grpc.max_reconnect_backoff_ms", 100))


@pytest.fixture
async def pods(tmp_path):
    """Start servers on one port of different loopback addresses, as pods have it."""
    port, model = free_port(), write_checkpoint(tmp_path, "BertModel")
    async with AsyncExitStack() as stack, serve_names(port) as names:

        async def start(address, *, listed=True, **options):
            served = await stack.enter_async_context(serve_fake(model, hostname=address, port=port, **options))
            if listed:
                names.addresses.append(address)
            return served

        yield names, start


async def call_until(ask, condition):
    """Call one after the other; the first failure is the test's."""
    async with asyncio.timeout(20):
        while not condition():
            await ask("embed", "w0")


async def test_new_server_gets_calls_once_connections_are_old_and_none_is_lost(pods, connect):
    names, start = pods
    first = await start("127.0.0.1", max_connection_age=0.3)
    async with connect(names.target, retries=ONCE, options=QUICK) as ask:
        await ask("embed", "w0")
        second = await start("127.0.0.2", max_connection_age=0.3)
        await call_until(ask, lambda: second.runner.batches)
        first.runner.batches.clear()
        await call_until(ask, lambda: first.runner.batches and len(second.runner.batches) > 5)


async def test_server_that_still_loads_gets_no_calls(pods, connect):
    names, start = pods
    serving = await start("127.0.0.1")
    loading = await start("127.0.0.2", load=False)
    async with connect(names.target, retries=ONCE, options=QUICK) as ask:
        await call_until(ask, lambda: len(serving.runner.batches) > 50)
        assert not loading.runner.batches
        await loading.engine.start()
        await call_until(ask, lambda: loading.runner.batches)


async def test_server_that_says_goodbye_loses_no_calls(pods, connect):
    names, start = pods
    staying = await start("127.0.0.1")
    leaving = await start("127.0.0.2", shutdown_delay=0.5)
    async with connect(names.target, retries=ONCE, options=QUICK) as ask:
        await call_until(ask, lambda: leaving.runner.batches)
        stopping = asyncio.create_task(leaving.server.stop())
        await call_until(ask, stopping.done)
        before = len(staying.runner.batches)
        await call_until(ask, lambda: len(staying.runner.batches) > before + 5)
