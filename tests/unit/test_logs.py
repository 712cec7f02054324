"""Log lines: levels, JSON and human form."""

import json
import logging
from datetime import datetime

import pytest

from tei_grpc import logs
from tei_grpc.types import Kind
from tests.unit.streams import flush, start

pytestmark = pytest.mark.usefixtures("restored_logging")


def test_json_line_has_the_fields_that_pipelines_for_tei_read() -> None:
    stream = start()
    logging.getLogger("tei_test.engine").info("Success", extra={"compute_tokens": 7})
    fields = json.loads(stream.getvalue())
    assert datetime.fromisoformat(fields.pop("timestamp")).tzinfo is not None
    assert isinstance(fields.pop("line_number"), int)
    assert fields == {
        "level": "INFO",
        "message": "Success",
        "target": "tei_test.engine",
        "filename": "test_logs.py",
        "compute_tokens": 7,
    }


def test_warning_is_called_warn_in_json() -> None:
    stream = start()
    logging.getLogger("tei_test").warning("careful")
    assert json.loads(stream.getvalue())["level"] == "WARN"


def test_span_is_shown_alone_and_in_the_list_of_spans() -> None:
    stream = start()
    logging.getLogger("tei_test").info("Success", extra={"span": {"name": "embed"}})
    flush()
    fields = json.loads(stream.getvalue())
    assert (fields["span"], fields["spans"]) == ({"name": "embed"}, [{"name": "embed"}])


def test_span_is_written_as_the_json_module_would() -> None:
    stream = start()
    span = {
        '"é\n': 'x"\\\n\x1b',
        "kind": Kind.EMBED,
        "n": 7,
        "yes": True,
        "none": None,
        "half": 0.5,
        "list": [1, {"a": 2}],
    }
    logging.getLogger("tei_test").info("Success", extra={"span": span})
    assert f'"span": {json.dumps(span, ensure_ascii=False)}, ' in stream.getvalue()


def test_spans_can_be_left_out_of_json() -> None:
    stream = start(disable_spans=True)
    logging.getLogger("tei_test").info("Success", extra={"span": {"name": "embed"}})
    flush()
    assert json.loads(stream.getvalue())["message"] == "Success"
    assert "span" not in stream.getvalue()


def test_exception_stays_on_the_json_line() -> None:
    stream = start()
    try:
        raise ValueError("inner")
    except ValueError:
        logging.getLogger("tei_test").exception("failed")
    assert len(stream.getvalue().splitlines()) == 1
    assert "ValueError: inner" in json.loads(stream.getvalue())["exception"]


def test_value_that_json_does_not_know_is_shown_as_text() -> None:
    stream = start()
    logging.getLogger("tei_test").info("x", extra={"where": {1}})
    assert json.loads(stream.getvalue())["where"] == "{1}"


def test_human_line_has_level_target_place_and_fields() -> None:
    stream = start(json_output=False)
    logging.getLogger("tei_test").info("Success", extra={"compute_tokens": 7})
    assert " INFO tei_test test_logs.py:" in stream.getvalue()
    assert stream.getvalue().endswith(": Success compute_tokens=7\n")


def test_human_line_shows_the_fields_of_a_span() -> None:
    stream = start(json_output=False)
    logging.getLogger("tei_test").info("Success", extra={"span": {"name": "embed", "compute_tokens": 7}})
    flush()
    assert stream.getvalue().endswith(": Success name=embed compute_tokens=7\n")


@pytest.mark.parametrize("json_output", [True, False])
def test_text_of_a_caller_cannot_begin_a_line(json_output: bool) -> None:
    stream = start(json_output=json_output)
    logging.getLogger("tei_test").info("refused %s", "a\nINFO forged")
    assert len(stream.getvalue().splitlines()) == 1


@pytest.mark.parametrize(
    ("text", "levels"),
    [
        ("info", {"": logging.INFO}),
        ("WARN", {"": logging.WARNING}),
        ("trace", {"": logging.DEBUG}),
        ("info,tei_grpc.engine=debug", {"": logging.INFO, "tei_grpc.engine": logging.DEBUG}),
        ("tei_grpc=debug", {"": logging.ERROR, "tei_grpc": logging.DEBUG}),
        ("info, tei_grpc = error", {"": logging.INFO, "tei_grpc": logging.ERROR}),
        ("loud", {"": logging.INFO}),
        ("warn,tei_grpc=loud", {"": logging.INFO}),
        ("", {"": logging.INFO}),
    ],
)
def test_log_level_forms(text: str, levels: dict[str, int]) -> None:
    assert logs.parse_levels(text) == levels


def test_off_silences_everything() -> None:
    stream = start("off")
    logging.getLogger("tei_test").critical("x")
    assert stream.getvalue() == ""


def test_module_has_a_level_of_its_own() -> None:
    stream = start("info,tei_test.engine=debug")
    logging.getLogger("tei_test.engine").debug("shown")
    logging.getLogger("tei_test.other").debug("hidden")
    assert [json.loads(line)["message"] for line in stream.getvalue().splitlines()] == ["shown"]


def test_configuring_again_replaces_the_first_output() -> None:
    first, second = start(), start()
    logging.getLogger("tei_test").info("x")
    assert first.getvalue() == ""
    assert len(second.getvalue().splitlines()) == 1


def test_time_is_utc_with_microseconds() -> None:
    assert logs.timestamp(1767225599.25) == "2025-12-31T23:59:59.250000Z"
