"""A real Prometheus scrapes a server: our dashboard and alerts ask for what is there."""

import asyncio
import json
import re
import shutil
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import grpc
import pytest

from tei_grpc.metrics import MetricsListener
from tei_grpc.pb import tei_pb2
from tests.e2e.servers import free_port
from tests.grpc.conftest import serve_fake, write_checkpoint
from tests.needs import need

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
DASHBOARD = DEPLOY / "grafana" / "dashboard.json"
RULES = DEPLOY / "prometheus"
START_SECONDS = 60


@pytest.fixture(scope="module", autouse=True)
def installed() -> None:
    need(shutil.which("prometheus"), "Prometheus is not installed: apt-get install prometheus")


def promtool(*arguments: str) -> None:
    run = subprocess.run(["promtool", *arguments], cwd=RULES, capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stdout + run.stderr


def test_configuration_and_alerts_are_valid() -> None:
    promtool("check", "config", "prometheus.yml")


def test_alerts_fire_when_they_should_and_only_then() -> None:
    promtool("test", "rules", "alerts_test.yml")


def expressions() -> list[str]:
    """Every query of the dashboard, with its variables filled in."""
    panels = json.loads(DASHBOARD.read_text())["panels"]
    queries = [target["expr"] for panel in panels for target in panel["targets"]]
    return [query.replace("$__rate_interval", "10s").replace("$instance", ".*") for query in queries]


def alert_expressions() -> list[str]:
    text = (RULES / "alerts.yml").read_text()
    found = re.findall(r"expr: (?:\|\n((?: {10,}.*\n)+)|(.*)\n)", text)
    return [" ".join((block or line).split()) for block, line in found]


class Prometheus:
    """Asks a running Prometheus."""

    def __init__(self, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}/api/v1/query?"

    def ask(self, query: str) -> list[dict]:
        """The series that answer a query; it must be one."""
        try:
            with urllib.request.urlopen(self._url + urllib.parse.urlencode({"query": query}), timeout=10) as response:
                return json.load(response)["data"]["result"]
        except urllib.error.HTTPError as error:
            pytest.fail(f"{query}: {error.read().decode()}")

    async def wait_for(self, query: str) -> list[dict]:
        """The series that answer a query, once there are any."""
        ends = time.monotonic() + START_SECONDS
        while time.monotonic() < ends:
            try:
                if found := await asyncio.to_thread(self.ask, query):
                    return found
            except OSError:
                pass  # not up yet
            await asyncio.sleep(0.2)
        pytest.fail(f"nothing answers {query}")


@pytest.fixture
async def prometheus(tmp_path: Path) -> AsyncIterator[Prometheus]:
    """Prometheus, scraping a server that has answered calls and goes on doing so."""
    (tmp_path / "model").mkdir()
    async with serve_fake(write_checkpoint(tmp_path / "model", "BertModel")) as served:
        listener = MetricsListener(served.engine.metrics, "127.0.0.1", 0)
        port = free_port()
        process = start(tmp_path, port, listener.address)
        calling = asyncio.create_task(call(served.embed))
        try:
            yield Prometheus(port)
        finally:
            calling.cancel()
            process.terminate()
            await asyncio.to_thread(process.wait)
            listener.close()


def start(folder: Path, port: int, target: str) -> subprocess.Popen:
    config = folder / "prometheus.yml"
    config.write_text(
        "global: {scrape_interval: 500ms, scrape_timeout: 500ms}\n"
        f"scrape_configs: [{{job_name: tei-grpc, static_configs: [{{targets: ['{target}']}}]}}]\n"
    )
    arguments = [f"--config.file={config}", f"--storage.tsdb.path={folder / 'data'}", "--log.level=error"]
    return subprocess.Popen(["prometheus", *arguments, f"--web.listen-address=127.0.0.1:{port}"])


async def call(embed) -> None:
    while True:
        await embed.Embed(tei_pb2.EmbedRequest(inputs="w1 w2"))
        with suppress(grpc.aio.AioRpcError):
            await embed.Embed(tei_pb2.EmbedRequest(inputs=""))
        await asyncio.sleep(0.05)


async def test_every_query_of_dashboard_and_alerts_is_answered(prometheus: Prometheus) -> None:
    await prometheus.wait_for("rate(te_batch_fill_count[10s]) > 0")
    await prometheus.wait_for("rate(te_request_success[10s]) > 0")
    for query in expressions():
        assert prometheus.ask(query) or "te_request_dropped" in query, query
    assert len(alert_expressions()) == (RULES / "alerts.yml").read_text().count("- alert:")
    for query in alert_expressions():
        prometheus.ask(query)
        for name in re.findall(r"te_\w+", query):
            assert prometheus.ask(name), name
    [up] = prometheus.ask('up{job="tei-grpc"}')
    assert up["value"][1] == "1"


async def test_what_prometheus_has_read_balances(prometheus: Prometheus) -> None:
    await prometheus.wait_for('te_request_failure{err="validation"} > 2')
    [difference] = prometheus.ask(
        "sum(te_request_count) - sum(te_request_success) - sum(te_request_failure) - sum(te_request_dropped)"
    )
    assert 0 <= float(difference["value"][1]) <= 1  # one may be running
