"""bge-m3's lexical weights and ColBERT vectors follow its definition, beside its pooled vectors and in one batch."""

import asyncio
from pathlib import Path

import grpc
import numpy as np
import pytest
import torch
import transformers
from grpc_health.v1 import health_pb2, health_pb2_grpc
from torch import Tensor

from tei_grpc.config import EngineConfig, Settings
from tei_grpc.engine.engine import Engine
from tei_grpc.engine.info import describe
from tei_grpc.engine.token_heads import strongest
from tei_grpc.engine.validation import check_kind
from tei_grpc.errors import ModelTypeError, StartupError
from tei_grpc.loading.model_config import read_model_config
from tei_grpc.pb import tei_pb2, tei_pb2_grpc
from tei_grpc.serve.grpc_server import GrpcServer
from tei_grpc.types import Kind
from tests import folders
from tests.checkpoints import SIZES, make_checkpoint
from tests.models.runners import load_runner, reference, run

# <s> text </s>, with repeated tokens, with <unk> and with <pad> inside
TEXTS = [
    np.array([0, *middle, 2], np.int32) for middle in ([17, 33, 17, 50, 3, 17], [], [8], [1, 60, 60, 41], range(5, 80))
]
DROPPED = {0, 1, 2, 3}
HIDDEN = SIZES["hidden_size"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """XLM-RoBERTa pooled by its first token, with both heads as FlagEmbedding stores them."""
    folder = make_checkpoint("xlm-roberta", tmp_path_factory.mktemp("bge-m3"))
    generator = torch.Generator().manual_seed(3)
    for name, rows in (("sparse_linear.pt", 1), ("colbert_linear.pt", HIDDEN)):
        state = {
            "weight": torch.randn(rows, HIDDEN, generator=generator),
            "bias": torch.randn(rows, generator=generator),
        }
        torch.save(state, folder / name)
    return folder


def hidden_states(folder: Path) -> list[np.ndarray]:
    return reference(transformers.AutoModel.from_pretrained(folder, attn_implementation="eager").eval(), TEXTS)


def head(folder: Path, name: str) -> dict[str, Tensor]:
    return {key: value.numpy() for key, value in torch.load(folder / name, weights_only=True).items()}


def literal_lexical(folder: Path) -> list[dict[int, float]]:
    """The largest relu(w h + b) of each token id, special tokens and zeros left out."""
    state, found = head(folder, "sparse_linear.pt"), []
    for ids, hidden in zip(TEXTS, hidden_states(folder), strict=True):
        weights: dict[int, float] = {}
        for token, vector in zip(ids.tolist(), hidden, strict=True):
            weight = max(0.0, float(state["weight"][0] @ vector + state["bias"][0]))
            if token not in DROPPED and weight > 0:
                weights[token] = max(weight, weights.get(token, 0.0))
        found.append(weights)
    return found


def literal_colbert(folder: Path) -> list[np.ndarray]:
    """W h + b of all tokens but the first, divided by its length."""
    state = head(folder, "colbert_linear.pt")
    vectors = [hidden[1:] @ state["weight"].T + state["bias"] for hidden in hidden_states(folder)]
    return [text / np.linalg.norm(text, axis=1, keepdims=True) for text in vectors]


def test_lexical_weights_are_those_of_the_definition(folder: Path) -> None:
    found = run(load_runner(folder), Kind.EMBED_SPARSE, TEXTS)
    for (indices, values), expected in zip(found, literal_lexical(folder), strict=True):
        assert indices.tolist() == sorted(expected)
        np.testing.assert_allclose(values, [expected[token] for token in sorted(expected)], atol=1e-5, rtol=0)
    assert any(len(indices) > 0 for indices, _ in found)


def test_strongest_weight_of_a_repeated_token_counts() -> None:
    weights = np.array([9.0, 0.5, 0.0, 0.75, 0.25, 9.0], np.float32)
    indices, values = strongest(np.array([0, 7, 9, 7, 5, 2], np.int32), weights, frozenset({0, 2}))
    assert indices.tolist() == [5, 7]
    assert values.tolist() == [0.25, 0.75]


def test_colbert_vectors_are_those_of_the_definition(folder: Path) -> None:
    found = run(load_runner(folder, colbert=True), Kind.EMBED_ALL, TEXTS)
    for (vectors,), expected in zip(found, literal_colbert(folder), strict=True):
        np.testing.assert_allclose(vectors, expected, atol=1e-5, rtol=0)


def test_token_vectors_are_hidden_states_unless_colbert_is_asked_for(folder: Path) -> None:
    found = run(load_runner(folder), Kind.EMBED_ALL, TEXTS)
    for (vectors,), expected in zip(found, hidden_states(folder), strict=True):
        np.testing.assert_allclose(vectors, expected, atol=1e-4, rtol=0)


def test_all_three_kinds_come_from_one_batch_as_alone(folder: Path) -> None:
    runner = load_runner(folder, colbert=True)
    kinds = [Kind.EMBED, Kind.EMBED_SPARSE, Kind.EMBED_ALL]
    mixed = run(runner, [kind for _ in TEXTS for kind in kinds], [text for text in TEXTS for _ in kinds])
    for row, text in enumerate(TEXTS):
        for column, kind in enumerate(kinds):
            (alone,) = run(runner, kind, [text])
            for together, single in zip(mixed[3 * row + column], alone, strict=True):
                np.testing.assert_allclose(together, single, atol=1e-5, rtol=0)


def test_pooled_vector_is_that_of_the_first_token(folder: Path) -> None:
    found = run(load_runner(folder, colbert=True), Kind.EMBED, TEXTS)
    for (vector,), hidden in zip(found, hidden_states(folder), strict=True):
        np.testing.assert_allclose(vector, hidden[0], atol=1e-4, rtol=0)


def test_bfloat16_stays_close(folder: Path) -> None:
    found = run(load_runner(folder, colbert=True, dtype="bfloat16"), Kind.EMBED_ALL, TEXTS)
    for (vectors,), expected in zip(found, literal_colbert(folder), strict=True):
        assert np.sum(vectors * expected, axis=1).min() >= 0.999


def test_info_offers_sparse_vectors(folder: Path) -> None:
    config = EngineConfig(model_id=str(folder))
    model = read_model_config(folder, config)
    info = describe(config, model, load_runner(folder).facts, sha=None, tokenization_workers=1)
    assert (info.embeds, info.embeds_sparse, info.embeds_all) == (True, True, True)
    check_kind(model, Kind.EMBED_SPARSE)


def test_model_without_a_lexical_head_refuses_sparse_vectors(tmp_path: Path) -> None:
    model = read_model_config(folders.embedder(tmp_path), EngineConfig(model_id=str(tmp_path)))
    with pytest.raises(ModelTypeError, match="SPLADE"):
        check_kind(model, Kind.EMBED_SPARSE)


def test_colbert_without_the_head_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="`--colbert`: the model has no ColBERT head, `colbert_linear.pt`"):
        read_model_config(folders.embedder(tmp_path), EngineConfig(model_id=str(tmp_path), colbert=True))


@pytest.mark.parametrize("make", [folders.reranker, folders.splade])
def test_colbert_on_another_kind_of_model_is_refused(tmp_path: Path, make) -> None:
    with pytest.raises(StartupError, match="`--colbert` is for embedding models"):
        read_model_config(make(tmp_path), EngineConfig(model_id=str(tmp_path), colbert=True))


def test_head_that_holds_more_than_tensors_is_refused(tmp_path: Path) -> None:
    make_checkpoint("xlm-roberta", tmp_path)
    torch.save({"weight": print}, tmp_path / "sparse_linear.pt")
    with pytest.raises(StartupError, match="could run code"):
        load_runner(tmp_path)


def test_head_of_another_width_is_refused(tmp_path: Path) -> None:
    make_checkpoint("xlm-roberta", tmp_path)
    torch.save({"weight": torch.ones(1, 7), "bias": torch.ones(1)}, tmp_path / "sparse_linear.pt")
    with pytest.raises(StartupError, match=rf"`weight` has shape \[1, 7\], the model needs \[1, {HIDDEN}\]"):
        load_runner(tmp_path)


async def test_engine_answers_all_three_at_the_same_time(folder: Path) -> None:
    async with Engine(EngineConfig(model_id=str(folder), colbert=True)) as engine:
        pooled, sparse, tokens = await asyncio.gather(
            engine.embed("hello query"), engine.embed_sparse("hello query"), engine.embed_all("hello query")
        )
        ids = [token.id for token in await engine.tokenize("hello query")]
    assert pooled.embeddings.shape == (HIDDEN,)
    assert set(sparse.indices.tolist()) <= set(ids) - DROPPED
    assert tokens.token_embeddings.shape == (len(ids) - 1, HIDDEN)
    np.testing.assert_allclose(np.linalg.norm(tokens.token_embeddings, axis=1), 1, atol=1e-5)


async def test_one_server_answers_all_three_and_health_says_so(folder: Path) -> None:
    settings = Settings.model_validate(
        {"model_id": str(folder), "colbert": True, "hostname": "127.0.0.1", "port": 0, "shutdown_grace": 0.5}
    )
    engine = Engine(settings)
    server = GrpcServer(settings, engine)
    address = (await server.start()).serving[0].local
    try:
        await engine.start()
        async with grpc.aio.insecure_channel(address) as channel:
            stub = tei_pb2_grpc.EmbedStub(channel)
            dense, sparse, every, health = await asyncio.gather(
                stub.Embed(tei_pb2.EmbedRequest(inputs="hello world")),
                stub.EmbedSparse(tei_pb2.EmbedSparseRequest(inputs="hello world")),
                stub.EmbedAll(tei_pb2.EmbedAllRequest(inputs="hello world")),
                health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service="tei.v1.Embed")),
            )
    finally:
        await server.stop()
    assert len(dense.embeddings) == HIDDEN
    assert all(value.index not in DROPPED and value.value > 0 for value in sparse.sparse_embeddings)
    assert len(every.token_embeddings) == every.metadata.compute_tokens - 1  # the first token is left out
    norms = [np.linalg.norm(token.embeddings) for token in every.token_embeddings]
    np.testing.assert_allclose(norms, 1.0, atol=1e-5)
    assert health.status == health_pb2.HealthCheckResponse.SERVING
    assert (engine.info.embeds, engine.info.embeds_sparse, engine.info.embeds_all) == (True, True, True)
