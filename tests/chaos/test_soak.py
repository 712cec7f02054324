"""A short form of `make soak`: too short to judge memory and latency, long enough for hangs and wrong counts."""

import pytest

from tests.chaos import soak
from tests.chaos.patients import patients
from tests.chaos.soak import Sample


async def test_saturated_servers_neither_hang_nor_lose_count():
    with patients() as servers:
        report = await soak.soak(servers, seconds=20, seed=1)
    assert report.is_good, "\n".join(report.lines())
    assert sum(report.outcomes.values()) > 100


def test_growth_is_that_of_the_second_half():
    samples = [Sample(at, 100 if at < 50 else 100 + at, 10) for at in range(100)]
    assert soak.memory_growth(samples) == pytest.approx((100 + 93.5) / (100 + 55.5) - 1)


def test_peaks_of_batches_are_no_growth():
    samples = [Sample(at, 1000 if at % 4 == 0 and at > 90 else 100, 10) for at in range(100)]
    assert soak.memory_growth(samples) == 0


def test_connections_that_come_and_go_are_no_growth_but_leaks_are():
    busy = [Sample(at, 1, 10 + at % 7) for at in range(80)]
    leaking = [Sample(at, 1, 10 + at % 7 + at // 20) for at in range(80)]
    assert (soak.descriptor_growth(busy), soak.descriptor_growth(leaking)) == (0, 1)


def test_drift_compares_the_last_minute_with_the_second():
    steady = [(at, 0.1) for at in range(600)]
    slower = [(at, 0.1 if at < 540 else 0.3) for at in range(600)]
    assert soak.latency_drift(steady) == 1
    assert soak.latency_drift(slower) == pytest.approx(3)
