"""grpcurl drives every unary RPC, and a stream, without a proto file."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.servers import Server
from tests.small_heads import small_heads

GRPCURL = Path(sys.executable).with_name("grpcurl")
SEP = "[SEP]"


@pytest.fixture(scope="module")
def servers(minilm_dir: Path, splade_dir: Path) -> Iterator[dict[str, str]]:
    """The address of a server for each kind of model."""
    heads = small_heads(minilm_dir)
    started = {
        "embedder": Server("--model-id", str(minilm_dir)),
        "splade": Server("--model-id", str(splade_dir), "--pooling", "splade"),
        "classifier": Server("--model-id", str(heads.sentiment)),
        "reranker": Server("--model-id", str(heads.reranker)),
    }
    try:
        yield {kind: server.wait_until_ready().address for kind, server in started.items()}
    finally:
        for server in started.values():
            server.kill()


def grpcurl(address: str, method: str, *requests: dict[str, object]) -> list[Any]:
    """Send the requests as JSON, and return the replies."""
    command = [str(GRPCURL), "-plaintext", "-d", "@", address, f"tei.v1.{method}"]
    messages = "\n".join(map(json.dumps, requests))
    call = subprocess.run(command, input=messages, capture_output=True, text=True, timeout=60)
    assert call.returncode == 0, call.stderr
    return list(json_values(call.stdout))


def json_values(text: str) -> Iterator[Any]:
    """JSON values one after the other."""
    decoder, start = json.JSONDecoder(), 0
    while start < len(text.rstrip()):
        value, end = decoder.raw_decode(text, start)
        yield value
        start = end + 1


def test_info(servers: dict[str, str]) -> None:
    (info,) = grpcurl(servers["reranker"], "Info/Info", {})
    assert info["modelType"] == "MODEL_TYPE_RERANKER"


def test_embed(servers: dict[str, str]) -> None:
    (reply,) = grpcurl(servers["embedder"], "Embed/Embed", {"inputs": "test", "dimensions": 128})
    assert sum(value * value for value in reply["embeddings"]) == pytest.approx(1, abs=1e-5)


def test_embed_all(servers: dict[str, str]) -> None:
    (reply,) = grpcurl(servers["embedder"], "Embed/EmbedAll", {"inputs": "test"})
    assert [len(token["embeddings"]) for token in reply["tokenEmbeddings"]] == [384] * 3  # [CLS] test [SEP]


def test_embed_sparse(servers: dict[str, str]) -> None:
    (reply,) = grpcurl(servers["splade"], "Embed/EmbedSparse", {"inputs": "capital of france"})
    indices = [entry["index"] for entry in reply["sparseEmbeddings"]]
    assert indices == sorted(set(indices))


def test_predict(servers: dict[str, str]) -> None:
    (reply,) = grpcurl(servers["classifier"], "Predict/Predict", {"inputs": "i enjoyed every minute of it"})
    assert [prediction["label"] for prediction in reply["predictions"]] == ["positive", "negative"]


def test_predict_pair(servers: dict[str, str]) -> None:
    inputs = ["How tall is the Eiffel Tower?", "The Eiffel Tower is 330 metres tall."]
    (reply,) = grpcurl(servers["reranker"], "Predict/PredictPair", {"inputs": inputs})
    assert reply["predictions"][0]["score"] > 0.5


def test_rerank(servers: dict[str, str]) -> None:
    texts = ["Cats sleep most of the day.", "The Eiffel Tower is 330 metres tall."]
    request = {"query": "How tall is the Eiffel Tower?", "texts": texts, "return_text": True}
    (reply,) = grpcurl(servers["reranker"], "Rerank/Rerank", request)
    assert [rank["text"] for rank in reply["ranks"]] == texts[::-1]


def test_tokenize_and_decode(servers: dict[str, str]) -> None:
    request = {"inputs": "Hello wörld", "add_special_tokens": True}
    (tokens,) = grpcurl(servers["embedder"], "Tokenize/Tokenize", request)
    assert [token["text"] for token in tokens["tokens"]] == ["[CLS]", "Hello", "wörld", SEP]
    ids = [token["id"] for token in tokens["tokens"]]
    (decoded,) = grpcurl(servers["embedder"], "Tokenize/Decode", {"ids": ids, "skip_special_tokens": True})
    assert decoded["text"] == "hello world"  # an uncased model without accents


def test_stream_of_embeddings(servers: dict[str, str]) -> None:
    texts = ["one", "two words", "three"]
    replies = grpcurl(servers["embedder"], "Embed/EmbedStream", *({"inputs": text} for text in texts))
    assert [reply["metadata"]["computeChars"] for reply in replies] == [3, 9, 5]


def test_stream_of_documents_to_rank(servers: dict[str, str]) -> None:
    texts = ["Cats sleep most of the day.", "The Eiffel Tower is 330 metres tall."]
    requests = [{"query": "How tall is the Eiffel Tower?", "text": text} for text in texts]
    (reply,) = grpcurl(servers["reranker"], "Rerank/RerankStream", *requests)
    assert [rank.get("index", 0) for rank in reply["ranks"]] == [1, 0]
