import grpc
import pytest
from tei_client import InvalidInputError, RetryPolicy, TeiClientError
from tei_client.calls import Call, Shape
from tei_client.progress import Progress

Code = grpc.StatusCode


def begin(*requests, shape=Shape.STREAM, policy=None, timeout=None):
    call = Call("/path", shape, requests, bytes, list)
    return Progress(call, policy or RetryPolicy(initial_delay=0, max_delay=0), timeout)


def test_wait_is_drawn_between_zero_and_a_doubling_limit():
    policy = RetryPolicy(initial_delay=0.1, max_delay=1)
    for failures, longest in [(1, 0.1), (2, 0.2), (3, 0.4), (4, 0.8), (5, 1), (5000, 1)]:
        delays = [policy.delay(failures) for _ in range(300)]
        assert 0 <= min(delays) < longest / 4
        assert longest * 3 / 4 < max(delays) <= longest


@pytest.mark.parametrize("wrong", [{"attempts": 0}, {"initial_delay": -1}, {"initial_delay": 2, "max_delay": 1}])
def test_policy_that_makes_no_sense_is_refused(wrong):
    with pytest.raises(ValueError, match="`attempts`|`initial_delay`"):
        RetryPolicy(**wrong)


def test_only_what_has_no_answer_is_sent_again():
    progress = begin(b"a", b"b", b"c")
    assert list(progress.unanswered()) == [b"a", b"b", b"c"]
    progress.add(b"1")
    progress.fail(Code.UNAVAILABLE, "")
    assert list(progress.unanswered()) == [b"b", b"c"]


def test_failures_without_an_answer_between_them_are_counted():
    progress = begin(b"a", b"b", policy=RetryPolicy(attempts=2, initial_delay=0, max_delay=0))
    progress.fail(Code.UNAVAILABLE, "")
    progress.add(b"1")
    progress.fail(Code.UNAVAILABLE, "")
    with pytest.raises(TeiClientError) as caught:
        progress.fail(Code.UNAVAILABLE, "gone")
    assert (caught.value.code, caught.value.message, caught.value.index) == (Code.UNAVAILABLE, "gone", 1)


PASSING = (Code.UNAVAILABLE, Code.RESOURCE_EXHAUSTED, Code.CANCELLED)


@pytest.mark.parametrize("code", [code for code in Code if code not in PASSING])
def test_lasting_errors_are_raised_at_once(code):
    with pytest.raises(TeiClientError) as caught:
        begin(b"a").fail(code, "no")
    assert caught.value.code is code
    assert isinstance(caught.value, InvalidInputError) is (code is Code.INVALID_ARGUMENT)


def test_stream_that_a_proxy_resets_is_tried_again():
    text = "Stream removed (RST_STREAM (Received RST_STREAM with error code 2))"  # as grpcio 1.85 says it behind Envoy
    assert begin(b"a").fail(Code.INTERNAL, text) == 0


@pytest.mark.parametrize("text", ["Channel closed!", "Locally cancelled by application!"])
def test_what_the_caller_ended_himself_is_not_tried_again(text):
    with pytest.raises(TeiClientError, match="CANCELLED"):
        begin(b"a").fail(Code.CANCELLED, text)


def test_no_attempt_is_made_that_the_timeout_would_cut_off():
    progress = begin(b"a", policy=RetryPolicy(initial_delay=1e9, max_delay=1e9), timeout=1)
    with pytest.raises(TeiClientError):
        progress.fail(Code.UNAVAILABLE, "")


def test_failure_after_the_last_answer_is_none():
    progress = begin(b"a")
    progress.add(b"1")
    assert progress.fail(Code.UNAVAILABLE, "") == 0
    assert progress.finish() == [b"1"]


def test_answers_that_do_not_match_the_requests_are_an_error():
    progress = begin(b"a", b"b")
    progress.add(b"1")
    with pytest.raises(TeiClientError, match="after 1 of 2 answers"):
        progress.end()


def test_error_tells_code_text_and_place():
    assert str(TeiClientError(Code.INTERNAL, "broken", 7)) == "INTERNAL: broken (input 7)"
    assert str(TeiClientError(Code.INTERNAL, "broken")) == "INTERNAL: broken"
