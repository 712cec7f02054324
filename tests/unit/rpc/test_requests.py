import pytest

from tei_grpc.errors import ValidationError
from tei_grpc.pb import tei_pb2
from tei_grpc.rpc.requests import direction_of, input_of, prompt_name_of, scoring_of
from tei_grpc.types import Input, Scoring, TruncationDirection


def test_fields_reach_the_input():
    request = tei_pb2.EmbedRequest(inputs="a", truncate=True, truncation_direction=1, prompt_name="query")
    assert input_of(request) == Input(
        "a", truncate=True, truncation_direction=TruncationDirection.LEFT, prompt_name="query"
    )


def test_empty_prompt_name_is_not_taken_for_absent():
    assert prompt_name_of(tei_pb2.EncodeRequest(prompt_name="")) == ""
    assert prompt_name_of(tei_pb2.EncodeRequest()) is None


def test_fields_reach_the_scoring():
    request = tei_pb2.PredictRequest(inputs="a", raw_scores=True, truncate=True)
    assert scoring_of(request) == Scoring(truncate=True, raw_scores=True)


def test_unknown_direction_is_named_with_its_value():
    with pytest.raises(ValidationError, match=r"`truncation_direction` must be .* Given: 7"):
        direction_of(7)
