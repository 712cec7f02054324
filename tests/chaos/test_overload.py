"""A short form of `python tests/chaos/overload.py`."""

from tests.chaos.overload import TARGET_MS, overload, percentile
from tests.checkpoints import bert_t


def test_server_is_serving_and_says_so_at_once_under_ten_times_its_load(tmp_path):
    report = overload(bert_t(tmp_path), permits=8, seconds=3)
    assert {probe.status for probe in report.loaded} == {"SERVING"}
    assert percentile(report.loaded, 0.5) < 10 * TARGET_MS
    assert report.calls.keys() == {"OK", "RESOURCE_EXHAUSTED"}
