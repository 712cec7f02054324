"""A short form of the faults in `make chaos`: what clients are told, that servers heal, that nothing is left over."""

import pytest

from tests.chaos import breakdowns, floods
from tests.chaos.faults import Fault, examine, is_well
from tests.chaos.sick import Size

SMALL = Size(connections=200, streams=500, pings=10_000, texts=10, readers=2)
TOLD = {
    breakdowns.model_raises: {"OK": 15, "INTERNAL": 1},
    breakdowns.memory_runs_out: {"OK": 17, "INTERNAL": 1},
    breakdowns.tokenizer_raises: {"OK": 15, "FAILED_PRECONDITION": 1},
    breakdowns.interpreter_hangs: {"OK": 1, "liveness failed": 1},
    breakdowns.process_crashes: {"UNAVAILABLE": 1},
    floods.clients_come_and_go: {"OK": 200},
    floods.streams_flood: {"answered": 500, "OK": 500},
    floods.readers_are_slow: {"stopped by flow control": 2},
    floods.texts_are_long: {"OK": 1},
}


@pytest.mark.parametrize("fault", TOLD, ids=lambda fault: fault.__name__)
async def test_fault_hits_only_those_who_take_part_and_leaves_nothing(fault: Fault):
    row = await examine(fault, SMALL)
    assert row.told == TOLD[fault]
    assert row.fault == "process_crashes" or set(row.beside) <= {"OK"}
    assert is_well(row, SMALL), row.line()


@pytest.mark.parametrize("fault", [breakdowns.model_hangs, breakdowns.thread_dies], ids=lambda fault: fault.__name__)
async def test_calls_that_a_broken_model_cannot_answer_are_told_so(fault: Fault):
    row = await examine(fault, SMALL)
    assert set(row.told) | set(row.beside) <= {"OK", "INTERNAL", "UNAVAILABLE"}
    assert row.told.total() == 16
    assert row.told["INTERNAL"] > 0
    assert is_well(row, SMALL), row.line()


async def test_connections_go_on_while_no_descriptor_is_left_for_new_ones():
    row = await examine(floods.descriptors_run_out, SMALL)
    assert row.told.pop("new: DEADLINE_EXCEEDED") == 1
    assert set(row.told) | set(row.beside) == {"OK"}
    assert is_well(row, SMALL), row.line()


async def test_connection_that_floods_with_pings_is_ended():
    row = await examine(floods.pings_flood, SMALL)
    assert row.told in ({"turned away": 1}, {"cut off": 1})
    assert set(row.beside) <= {"OK"}
    assert is_well(row, SMALL), row.line()
