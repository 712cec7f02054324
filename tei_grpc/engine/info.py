"""What a loaded engine says of itself."""

from tei_grpc.config import EngineConfig
from tei_grpc.loading.model_config import ModelConfig
from tei_grpc.types import Info, ModelFacts, ModelType, Pooling


def describe(
    config: EngineConfig, model: ModelConfig, facts: ModelFacts, *, sha: str | None, tokenization_workers: int
) -> Info:
    """The limits in force, and which kinds of request the model answers."""
    embedding = model.kind is ModelType.EMBEDDING
    splade = Pooling.SPLADE in model.pooling
    return Info(
        model_id=config.model_id,
        model_sha=sha,
        model_dtype=facts.dtype,
        model_type=model.kind,
        device=facts.device,
        optimized=facts.optimized,
        max_concurrent_requests=config.max_concurrent_requests,
        max_input_length=model.max_input_length,
        max_batch_tokens=config.max_batch_tokens,
        max_batch_requests=config.max_batch_requests,
        max_client_batch_size=config.max_client_batch_size,
        tokenization_workers=tokenization_workers,
        embeds=embedding,
        embeds_sparse=splade or model.token_heads.lexical is not None,
        embeds_all=embedding and not splade,
        hidden_size=facts.hidden_size,
        kernels=facts.kernels,
        prompts=model.prompts,
        pooling=model.pooling,
        modules=tuple(module.type for module in model.modules),
    )
