"""A short form of the faults in `make chaos`: what clients are told, that servers heal, that nothing is left over."""

import pytest

from tests.chaos import faults
from tests.chaos.faults import Fault, Size, examine, is_well

SMALL = Size(connections=200, streams=500, pings=10_000, texts=10)
TOLD = {
    faults.model_raises: {"OK": 15, "INTERNAL": 1},
    faults.memory_runs_out: {"OK": 15, "INTERNAL": 1},
    faults.tokenizer_raises: {"OK": 15, "FAILED_PRECONDITION": 1},
    faults.process_crashes: {"UNAVAILABLE": 1},
    faults.clients_come_and_go: {"OK": 200},
    faults.streams_flood: {"answered": 500, "OK": 500},
    faults.readers_are_slow: {"stopped by flow control": 50},
    faults.texts_are_long: {"OK": 1},
    faults.pings_flood: {"turned away": 1},
}


@pytest.mark.parametrize("fault", TOLD, ids=lambda fault: fault.__name__)
async def test_fault_hits_only_those_who_take_part_and_leaves_nothing(fault: Fault):
    row = await examine(fault, SMALL)
    assert row.told == TOLD[fault]
    assert row.fault == "process_crashes" or set(row.beside) <= {"OK"}
    assert is_well(row), row.line()


@pytest.mark.parametrize("fault", [faults.model_hangs, faults.thread_dies], ids=lambda fault: fault.__name__)
async def test_calls_that_a_broken_model_cannot_answer_are_told_so(fault: Fault):
    row = await examine(fault, SMALL)
    assert set(row.told) | set(row.beside) <= {"OK", "INTERNAL", "UNAVAILABLE"}
    assert row.told.total() == 16
    assert row.told["INTERNAL"] > 0
    assert is_well(row), row.line()


async def test_connections_go_on_while_no_descriptor_is_left_for_new_ones():
    row = await examine(faults.descriptors_run_out, SMALL)
    assert set(row.told) | set(row.beside) == {"OK"}
    assert is_well(row), row.line()
