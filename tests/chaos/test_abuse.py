"""A short form of `make chaos`."""

from tests.chaos.abuse import abuse
from tests.chaos.patients import patients


async def test_abuse_leaves_no_trace():
    with patients() as servers:
        report = await abuse(servers, calls=600, warm_up=600, seed=1)
    assert report.is_good, "\n".join(report.lines())
