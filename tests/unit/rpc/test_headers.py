from dataclasses import replace

import pytest

from tei_grpc.rpc.headers import headers_of
from tei_grpc.types import Info, Metadata, ModelType

INFO = Info(
    model_id="m",
    model_sha=None,
    model_dtype="float32",
    model_type=ModelType.EMBEDDING,
    device="cpu",
    optimized=True,
    max_concurrent_requests=1,
    max_input_length=1,
    max_batch_tokens=1,
    max_batch_requests=None,
    max_client_batch_size=1,
    tokenization_workers=1,
    embeds=True,
    embeds_sparse=False,
    embeds_all=True,
    hidden_size=1,
)
MS = 1_000_000


def test_times_are_whole_milliseconds_cut_off():
    headers = dict(headers_of(Metadata(7, 3, 5 * MS + 999_999, MS - 1, 2 * MS, 3 * MS), INFO))
    assert headers == {
        "x-compute-type": "cpu+optimized",
        "x-compute-time": "5",
        "x-total-time": "5",
        "x-compute-characters": "7",
        "x-compute-tokens": "3",
        "x-tokenization-time": "0",
        "x-queue-time": "2",
        "x-inference-time": "3",
    }


@pytest.mark.parametrize(
    ("device", "optimized", "expected"),
    [("cpu", False, "cpu"), ("cuda", True, "gpu+optimized"), ("cuda", False, "gpu"), ("mps", False, "gpu")],
)
def test_compute_type_names_device_and_implementation(device, optimized, expected):
    info = replace(INFO, device=device, optimized=optimized)
    assert dict(headers_of(Metadata(0, 0, 0, 0, 0, 0), info))["x-compute-type"] == expected
