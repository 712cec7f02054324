"""Traces: off unless asked for, and what the stages of an input are. The rest is tested with a collector."""

import subprocess
import sys

import pytest

from tei_grpc.config import Settings
from tei_grpc.errors import StartupError
from tei_grpc.traces import AnsweredInput, open_traces, stages
from tei_grpc.types import Metadata


def test_stages_lie_end_to_end_before_the_answer() -> None:
    metadata = Metadata(4, 3, total_time_ns=100, tokenization_time_ns=10, queue_time_ns=20, inference_time_ns=30)
    assert list(stages(AnsweredInput(1000, metadata))) == [
        ("tokenize", 900, 910),
        ("queue", 910, 930),
        ("inference", 930, 960),
    ]


def test_no_endpoint_means_no_traces_and_no_import() -> None:
    code = (
        "import sys, tei_grpc.serve.grpc_server; from tei_grpc.config import Settings; "
        "from tei_grpc.traces import open_traces; "
        "assert open_traces(Settings(model_id='m')) is None; "
        "sys.exit('opentelemetry' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_missing_packages_are_named_with_their_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "tei_grpc.traces.recorder", raising=False)
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.grpc.trace_exporter", None)
    with pytest.raises(StartupError, match=r"`--otlp-endpoint`.*tei-grpc\[otel\]"):
        open_traces(Settings(model_id="m", otlp_endpoint="http://127.0.0.1:4317"))
