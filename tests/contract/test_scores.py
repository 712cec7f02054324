"""Predict and Rerank: scores, their order, and what belongs to whom."""

from collections.abc import Sequence

import numpy as np
import pytest

from tei_grpc.pb import tei_pb2
from tests.contract.inputs import WORDS, text_of
from tests.contract.targets import Code, Target

QUERY = "How tall is the Eiffel Tower?"
TEXTS = ["Cats sleep most of the day.", "The Eiffel Tower is 330 metres tall.", "The Louvre is a museum in Paris."]
LEFT = tei_pb2.TRUNCATION_DIRECTION_LEFT

TIES = pytest.mark.difference("equal scores: higher index first; here lower index first")
STREAM = pytest.mark.difference("RerankStream: never answers when all goes well; here it does")


def predict(target: Target, *inputs: str, **fields: object) -> Sequence[tei_pb2.Prediction]:
    if len(inputs) == 1:
        outcome = target.ask("Predict/Predict", tei_pb2.PredictRequest(inputs=inputs[0], **fields))
    else:
        outcome = target.ask("Predict/PredictPair", tei_pb2.PredictPairRequest(inputs=inputs, **fields))
    found: Sequence[tei_pb2.Prediction] = outcome.reply.predictions
    return found


def rerank(target: Target, query: str, texts: Sequence[str], **fields: object) -> Sequence[tei_pb2.Rank]:
    outcome = target.ask("Rerank/Rerank", tei_pb2.RerankRequest(query=query, texts=texts, **fields))
    found: Sequence[tei_pb2.Rank] = outcome.reply.ranks
    return found


def by_label(predictions: Sequence[tei_pb2.Prediction]) -> dict[str, float]:
    return {prediction.label: prediction.score for prediction in predictions}


def by_index(ranks: Sequence[tei_pb2.Rank]) -> dict[int, float]:
    return {rank.index: rank.score for rank in ranks}


@pytest.mark.parametrize("raw", [False, True])
def test_every_label_comes_once_best_first(classifier: Target, raw: bool) -> None:
    found = predict(classifier, "a good day", raw_scores=raw)
    scores = [prediction.score for prediction in found]
    assert scores == sorted(scores, reverse=True)
    assert len(by_label(found)) == len(found) > 1


def test_scores_of_several_labels_are_the_softmax_of_the_logits(classifier: Target) -> None:
    logits = by_label(predict(classifier, "a good day", raw_scores=True))
    scores = by_label(predict(classifier, "a good day"))
    total = sum(np.exp(logit) for logit in logits.values())
    for label, logit in logits.items():
        assert scores[label] == pytest.approx(np.exp(logit) / total, abs=1e-6)


def test_score_of_one_label_is_the_sigmoid_of_its_logit(reranker: Target) -> None:
    ((label, logit),) = by_label(predict(reranker, "a", "b", raw_scores=True)).items()
    assert by_label(predict(reranker, "a", "b")) == {label: pytest.approx(1 / (1 + np.exp(-logit)), abs=1e-6)}


def test_pair_of_one_text_is_that_text(classifier: Target) -> None:
    single = by_label(predict(classifier, "a good day"))
    outcome = classifier.ask("Predict/PredictPair", tei_pb2.PredictPairRequest(inputs=["a good day"]))
    assert by_label(outcome.reply.predictions) == pytest.approx(single, abs=1e-6)


def test_pair_is_not_the_two_texts_in_one(classifier: Target) -> None:
    joined = by_label(predict(classifier, "good bad", raw_scores=True))
    assert by_label(predict(classifier, "good", "bad", raw_scores=True)) != pytest.approx(joined, abs=1e-3)


def test_one_side_of_a_pair_may_be_empty(classifier: Target) -> None:
    assert predict(classifier, "", "good") and predict(classifier, "good", "")


def test_predict_truncates_on_either_side(classifier: Target) -> None:
    kept = text_of(classifier, classifier.info.max_input_length, WORDS[0])
    expected = pytest.approx(by_label(predict(classifier, kept, raw_scores=True)), abs=1e-5)
    right = predict(classifier, f"{kept} {WORDS[1]}", raw_scores=True, truncate=True)
    left = predict(classifier, f"{WORDS[1]} {kept}", raw_scores=True, truncate=True, truncation_direction=LEFT)
    assert by_label(right) == expected
    assert by_label(left) == expected


def test_labels_of_the_sentiment_model_say_what_a_reader_would(classifier: Target) -> None:
    if not classifier.is_ours:
        pytest.skip("the model is not known")
    assert predict(classifier, "this is really good, i enjoyed every minute")[0].label == "positive"
    assert predict(classifier, "this is really bad, never again")[0].label == "negative"


@pytest.mark.parametrize("raw", [False, True])
def test_texts_come_best_first_each_with_its_position(reranker: Target, raw: bool) -> None:
    ranks = rerank(reranker, QUERY, TEXTS, raw_scores=raw)
    scores = [rank.score for rank in ranks]
    assert scores == sorted(scores, reverse=True)
    assert sorted(rank.index for rank in ranks) == [0, 1, 2]


def test_score_belongs_to_the_text_at_its_position(reranker: Target) -> None:
    together = by_index(rerank(reranker, QUERY, TEXTS, raw_scores=True))
    for index, text in enumerate(TEXTS):
        assert rerank(reranker, QUERY, [text], raw_scores=True)[0].score == pytest.approx(together[index], abs=1e-5)


def test_answer_to_the_question_is_best(reranker: Target) -> None:
    assert rerank(reranker, QUERY, TEXTS)[0].index == 1


def test_scores_are_sigmoids_unless_raw(reranker: Target) -> None:
    logits = by_index(rerank(reranker, QUERY, TEXTS, raw_scores=True))
    scores = by_index(rerank(reranker, QUERY, TEXTS))
    for index, logit in logits.items():
        assert scores[index] == pytest.approx(1 / (1 + np.exp(-logit)), abs=1e-6)


def test_rank_and_prediction_of_a_pair_agree(reranker: Target) -> None:
    (prediction,) = predict(reranker, QUERY, TEXTS[0], raw_scores=True)
    assert rerank(reranker, QUERY, TEXTS[:1], raw_scores=True)[0].score == pytest.approx(prediction.score, abs=1e-5)


def test_text_is_returned_only_when_asked_for(reranker: Target) -> None:
    assert not any(rank.HasField("text") for rank in rerank(reranker, QUERY, TEXTS))
    for rank in rerank(reranker, QUERY, ["", *TEXTS], return_text=True):
        assert rank.HasField("text")
        assert rank.text == ["", *TEXTS][rank.index]


@TIES
def test_equal_texts_keep_their_order(reranker: Target) -> None:
    assert [rank.index for rank in rerank(reranker, QUERY, ["same"] * 3)] == [0, 1, 2]


def test_query_or_text_may_be_empty(reranker: Target) -> None:
    assert len(rerank(reranker, "", ["a", "b"])) == len(rerank(reranker, "a", ["", "b"])) == 2


def test_one_text_with_both_sides_empty_fails_the_call(reranker: Target) -> None:
    outcome = reranker.ask("Rerank/Rerank", tei_pb2.RerankRequest(query="", texts=["a", ""]))
    assert outcome.status == (Code.INVALID_ARGUMENT, "Input validation error: `inputs` cannot be empty")


def test_more_texts_than_permits_wait_for_their_turn(reranker: Target) -> None:
    request = tei_pb2.RerankRequest(query=QUERY, texts=["a"] * reranker.info.max_client_batch_size)
    calls = [reranker.open("Rerank/Rerank", [request], timeout=60) for _ in range(2)]
    assert [len(next(call).ranks) for call in calls] == [reranker.info.max_client_batch_size] * 2


def stream(target: Target, *messages: tei_pb2.RerankStreamRequest) -> Sequence[tei_pb2.Rank]:
    ranks: Sequence[tei_pb2.Rank] = target.ask("Rerank/RerankStream", *messages, timeout=30).reply.ranks
    return ranks


def message(text: str, query: str = QUERY, **fields: object) -> tei_pb2.RerankStreamRequest:
    return tei_pb2.RerankStreamRequest(query=query, text=text, **fields)


@STREAM
@pytest.mark.parametrize("raw", [False, True])
def test_rerank_stream_ranks_as_rerank_does(reranker: Target, raw: bool) -> None:
    streamed = stream(reranker, *(message(text, raw_scores=raw) for text in TEXTS))
    ranks = rerank(reranker, QUERY, TEXTS, raw_scores=raw)
    assert [rank.index for rank in streamed] == [rank.index for rank in ranks]
    np.testing.assert_allclose([rank.score for rank in streamed], [rank.score for rank in ranks], atol=1e-5)


@STREAM
def test_first_message_says_how_a_stream_is_answered(reranker: Target) -> None:
    logits = by_index(rerank(reranker, QUERY, TEXTS[:2], raw_scores=True))
    first_asks = stream(reranker, message(TEXTS[0], raw_scores=True, return_text=True), message(TEXTS[1]))
    assert by_index(first_asks) == pytest.approx(logits, abs=1e-5)
    assert {rank.index: rank.text for rank in first_asks} == dict(enumerate(TEXTS[:2]))
    later_asks = stream(reranker, message(TEXTS[0]), message(TEXTS[1], raw_scores=True, return_text=True))
    assert not any(rank.HasField("text") or rank.score < 0 for rank in later_asks)


@STREAM
def test_every_message_may_have_a_query_of_its_own(reranker: Target) -> None:
    queries = [QUERY, "Where do cats sleep?"]
    streamed = by_index(stream(reranker, *(message(TEXTS[0], query, raw_scores=True) for query in queries)))
    for index, query in enumerate(queries):
        alone = rerank(reranker, query, TEXTS[:1], raw_scores=True)[0].score
        assert streamed[index] == pytest.approx(alone, abs=1e-5)


@STREAM
def test_every_message_says_how_it_is_truncated(reranker: Target) -> None:
    long = " ".join([WORDS[0]] * reranker.info.max_input_length) + f" {WORDS[1]}"
    streamed = by_index(
        stream(
            reranker,
            message("a", raw_scores=True),
            message(long, truncate=True),
            message(long, truncate=True, truncation_direction=LEFT),
        )
    )
    right = rerank(reranker, QUERY, [long], raw_scores=True, truncate=True)[0].score
    left = rerank(reranker, QUERY, [long], raw_scores=True, truncate=True, truncation_direction=LEFT)[0].score
    assert (streamed[1], streamed[2]) == pytest.approx((right, left), abs=1e-5)
    refused = reranker.ask("Rerank/RerankStream", message("a", truncate=True), message(long), timeout=30)
    assert refused.code is Code.INVALID_ARGUMENT


@STREAM
def test_rerank_stream_may_be_longer_than_a_client_batch(reranker: Target) -> None:
    count = 2 * reranker.info.max_client_batch_size
    assert len(stream(reranker, *[message("a")] * count)) == count


@pytest.mark.difference("RerankStream without a message: never answers; here INVALID_ARGUMENT")
def test_rerank_stream_without_a_message_is_refused(reranker: Target) -> None:
    assert reranker.ask("Rerank/RerankStream", timeout=30).status == (
        Code.INVALID_ARGUMENT,
        "`texts` cannot be empty",
    )


@pytest.mark.parametrize("bad", [b"\xff\xff", message("", query=""), message("a", truncation_direction=9)])
def test_bad_message_ends_a_rerank_stream(reranker: Target, bad: object) -> None:
    outcome = reranker.ask("Rerank/RerankStream", message("a"), bad, message("b"), timeout=30)
    assert outcome.code in (Code.INTERNAL, Code.INVALID_ARGUMENT)
