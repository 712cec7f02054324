import logging

import grpc
import pytest

from tei_grpc import errors
from tei_grpc.errors import ErrorKind
from tei_grpc.rpc.status import CODES, MAX_TEXT_BYTES, status_of


def test_every_kind_of_error_has_a_code():
    assert CODES.keys() == set(ErrorKind)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.ValidationError("x", prefixed=False), grpc.StatusCode.INVALID_ARGUMENT),
        (errors.OverloadedError("x"), grpc.StatusCode.RESOURCE_EXHAUSTED),
        (errors.ModelTypeError("x"), grpc.StatusCode.FAILED_PRECONDITION),
        (errors.TokenizationError("x"), grpc.StatusCode.FAILED_PRECONDITION),
        (errors.DeadlineError("x"), grpc.StatusCode.DEADLINE_EXCEEDED),
        (errors.UnavailableError("x"), grpc.StatusCode.UNAVAILABLE),
        (errors.UnauthenticatedError("x"), grpc.StatusCode.UNAUTHENTICATED),
        (errors.UndecodableError("x"), grpc.StatusCode.INTERNAL),
    ],
)
def test_errors_for_callers_keep_their_text(error, code):
    assert status_of(error, "17") == (code, "x")


def test_failure_of_the_model_names_the_call():
    status = status_of(errors.InferenceError("Inference failed"), "17")
    assert status == (grpc.StatusCode.INTERNAL, "Inference failed, id 17")


def test_every_error_class_is_covered_by_the_table():
    classes = errors.TeiError.__subclasses__()
    assert {cls.kind for cls in classes} == set(ErrorKind)


def test_other_errors_are_bland_and_logged_under_the_id(caplog):
    with caplog.at_level(logging.ERROR):
        code, text = status_of(KeyError("/secret"), "17")
    assert code is grpc.StatusCode.INTERNAL
    [record] = caplog.records
    assert text == record.getMessage() == "Internal error, id 17"
    assert isinstance(record.exc_info[1], KeyError)


def test_long_texts_are_cut_between_characters():
    text = status_of(errors.ModelTypeError("é" * MAX_TEXT_BYTES), "17").text
    assert text == "é" * (MAX_TEXT_BYTES // 2)
