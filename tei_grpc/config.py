"""One definition per option: field name, flag, environment name, default, type and help.

A field `max_batch_tokens` is the flag `--max-batch-tokens` and the environment name `MAX_BATCH_TOKENS`. Fields are
grouped in classes whose docstring is the group's title in `--help` and in the docs. `Settings` are all of them, an
EngineConfig and a ServerConfig in one. Constructing these classes by hand reads no environment.
"""

from pathlib import Path
from typing import Literal

import pydantic
from pydantic import BaseModel, ConfigDict, Field

from tei_grpc.values import (
    Age,
    AgeGrace,
    ApiKey,
    CollectorUrl,
    Count,
    Device,
    Frontends,
    HubToken,
    IpLiteral,
    ListenAddresses,
    MessageSize,
    Port,
    Seconds,
    Texts,
    read_keys,
)


class OptionGroup(BaseModel):
    """Options that belong together."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True, protected_namespaces=())


class ModelOptions(OptionGroup):
    """Model"""

    model_id: str = Field(min_length=1, description="model to serve: a Hugging Face Hub id, or a local directory")
    revision: str | None = Field(None, description="branch, tag or commit on the Hub")
    dtype: Literal["float32", "float16", "bfloat16", "int8"] | None = Field(
        None,
        description="float32, float16, bfloat16 or int8: type of weights and activations; when left out float32, on "
        "CUDA the checkpoint's own 16-bit type or float16. int8 is for linear layers on a CPU with fast int8 products, "
        "the rest is bfloat16",
    )
    device: Device = Field(
        "auto", description="auto, cpu, cuda, cuda:N or mps; auto is the first of cuda, mps, cpu that is there"
    )
    use_flash_attention: bool = Field(
        True, description="run attention on flash-attention kernels, torch's or flash-attn's, where the device has them"
    )
    torch_compile: bool = Field(
        False, description="compile the model for the CUDA device, for large batches; takes a minute or more at start"
    )
    pooling: Literal["cls", "mean", "splade", "last-token"] | None = Field(
        None, description="cls, mean, splade or last-token: how token vectors become one; the model's own when left out"
    )
    lora_task: str | None = Field(
        None, description="name of the model's LoRA adaptation; its weights without any when left out"
    )
    chat_template: str | None = Field(
        None,
        min_length=1,
        description="Jinja file with roles `query` and `document` for a reranker that is a language model, "
        "or `qwen3-reranker`; the model's own when left out",
    )
    colbert: bool = Field(
        False, description="let EmbedAll answer with the vectors of the model's ColBERT head (bge-m3)"
    )
    force_generic: bool = Field(
        False, description="run the model through transformers even where this server has its own implementation"
    )
    dense_path: str | None = Field(
        None, description="directory of a Dense module to run after pooling, in place of the model's own, if it has one"
    )
    default_prompt_name: str | None = Field(None, description="name of the model's prompt that requests get by default")
    default_prompt: str | None = Field(None, description="text put before every input to embed by default")
    hf_token: HubToken = Field(None, description="Hub token")
    huggingface_hub_cache: Path | None = Field(None, description="directory of downloaded models")


class RequestOptions(OptionGroup):
    """Requests and batches"""

    max_concurrent_requests: Count = Field(512, description="requests in work at a time; more are refused or wait")
    max_batch_tokens: Count = Field(16384, description="tokens in one batch")
    max_batch_requests: Count | None = Field(None, description="inputs in one batch; no limit when left out")
    max_client_batch_size: Count = Field(32, description="texts in one Rerank request")
    auto_truncate: bool = Field(
        True, description="lower the maximum input length to `--max-batch-tokens` instead of refusing to start"
    )
    runner_timeout: Seconds = Field(
        60.0,
        description="seconds, and 20 times what its tokens took at start, that a batch may take; then the model counts "
        "as hung, callers are told so, and health turns",
    )
    tokenization_workers: Count | None = Field(
        None, description="tokenizer threads; one less than the CPU cores when left out"
    )
    split_special_tokens: bool = Field(False, description="read the text of a special token in an input as plain text")


class ListenerOptions(OptionGroup):
    """Server"""

    hostname: IpLiteral = Field("0.0.0.0", description="IP address to listen on")  # noqa: S104 - containers need it
    port: Port = Field(3000, description="gRPC port; 0 takes a free one")
    uds_listen: Path | None = Field(None, description="Unix socket to listen on instead of the port")
    listen: ListenAddresses = Field(
        (), description="one more address, HOST:PORT or unix:PATH; can be repeated, LISTEN is separated by commas"
    )
    frontends: Frontends = Field(
        0,
        description="processes that accept calls, tokenize, and encode replies, in front of the one that runs the "
        "model; 0: that one does it all",
    )
    health_port: Port | None = Field(None, description="one more port, for health checks only, never encrypted")
    api_key: ApiKey | None = Field(None, description="key that callers send as `authorization: Bearer KEY`")
    api_key_file: Path | None = Field(None, description="file of further keys, one a line")
    tls_cert: Path | None = Field(
        None, description="PEM file of the server's certificate: encrypts all gRPC ports but `--health-port`"
    )
    tls_key: Path | None = Field(None, description="PEM file of its private key")
    tls_client_ca: Path | None = Field(
        None, description="PEM file of authorities: only clients with a certificate of theirs are let in"
    )
    max_recv_message_size: MessageSize = Field(4194304, description="bytes of the largest request; -1: no limit")
    max_send_message_size: MessageSize = Field(-1, description="bytes of the largest response; -1: no limit")
    grpc_max_parallel_stream_requests: Count = Field(1024, description="messages of one stream in work at a time")
    max_connections: Count | None = Field(
        None, description="connections at a time, for each address; further ones are refused; no limit when left out"
    )
    max_connection_streams: Count = Field(
        16384, description="calls open at a time on one connection; its client keeps further ones back"
    )
    max_connection_age: Age | None = Field(
        None,
        description="seconds, give or take a tenth, until clients have to connect anew; no limit when left out",
    )
    max_connection_age_grace: AgeGrace | None = Field(
        None, description="seconds that calls on such a connection get to finish; no limit when left out"
    )
    shutdown_grace: Seconds = Field(30.0, description="seconds that running calls get to finish at shutdown")
    shutdown_delay: Seconds = Field(0.0, description="seconds to go on serving, with health NOT_SERVING, before that")


class ObservabilityOptions(OptionGroup):
    """Logs, metrics and traces"""

    log_level: str = Field("info", description="`info`, or by module: `info,tei_grpc.engine=debug`")
    json_output: bool = Field(False, description="one JSON object per log line")
    disable_spans: bool = Field(False, description="leave the span of a request out of JSON log lines")
    prometheus_port: Port = Field(9000, description="port of the metrics; 0 turns them off")
    otlp_endpoint: CollectorUrl | None = Field(
        None, description="URL of an OpenTelemetry collector (OTLP over gRPC); no traces when left out"
    )
    otlp_service_name: str = Field("text-embeddings-inference.server", description="name of this server in traces")


class InertOptions(OptionGroup):
    """Accepted for compatibility, without effect"""

    uds_path: str | None = Field(None, description="socket of a separate model process; there is none")
    payload_limit: int | None = Field(None, description="HTTP only; see `--max-recv-message-size`")
    cors_allow_origin: Texts = Field((), description="HTTP only")
    served_model_name: str | None = Field(None, description="HTTP only")


NEEDS = (
    ("tls_cert", "tls_key"),
    ("tls_key", "tls_cert"),
    ("tls_client_ca", "tls_cert"),
    ("max_connection_age_grace", "max_connection_age"),
)


class EngineConfig(ModelOptions, RequestOptions):
    """What the engine needs to know."""

    @pydantic.model_validator(mode="after")
    def _one_default_prompt(self) -> "EngineConfig":
        if self.default_prompt is not None and self.default_prompt_name is not None:
            raise ValueError("`--default-prompt` and `--default-prompt-name` exclude each other; give one")
        return self


class ServerConfig(ListenerOptions, ObservabilityOptions, InertOptions):
    """What the front door needs to know."""

    @pydantic.model_validator(mode="after")
    def _whole_pairs(self) -> "ServerConfig":
        for name, needed in NEEDS:
            if getattr(self, name) is not None and getattr(self, needed) is None:
                raise ValueError(f"`{flag(name)}` needs `{flag(needed)}`, too")
        return self

    @property
    def has_files_to_reload(self) -> bool:
        """Whether SIGHUP means that keys or certificates are to be read anew; otherwise it ends the process."""
        return self.api_key_file is not None or self.tls_cert is not None

    @pydantic.model_validator(mode="after")
    def _shared_listeners(self) -> "ServerConfig":
        sockets = [text for text in self.listen if text.startswith("unix:")]
        if self.frontends and (self.uds_listen is not None or sockets):
            raise ValueError("`--frontends` share ports, but a Unix socket cannot be shared; leave one of them out")
        return self

    def api_keys(self) -> tuple[str, ...]:
        """Return all accepted keys; none means open to everybody. Raises StartupError when the file gives no key."""
        given = () if self.api_key is None else (self.api_key.get_secret_value(),)
        return given + (() if self.api_key_file is None else read_keys(self.api_key_file))


class Settings(EngineConfig, ServerConfig):
    """Everything that `tei-grpc` takes; hand it to the engine and to the server."""

    hf_api_token: HubToken = Field(None, description="old name of `--hf-token`")

    @pydantic.model_validator(mode="before")
    @classmethod
    def _take_old_token(cls, values: dict[str, object]) -> dict[str, object]:
        if not values.get("hf_api_token"):
            return values
        if values.get("hf_token"):
            raise ValueError("`--hf-api-token` and `--hf-token` exclude each other; give `--hf-token`")
        return {**values, "hf_token": values["hf_api_token"]}


GROUPS: tuple[type[OptionGroup], ...] = (
    ModelOptions,
    RequestOptions,
    ListenerOptions,
    ObservabilityOptions,
    InertOptions,
)


def flag(name: str) -> str:
    """Return the command-line spelling of a field: `model_id` -> `--model-id`."""
    return "--" + name.replace("_", "-")


def describe(settings: BaseModel) -> dict[str, object]:
    """Return the options that were given, fit for a log: secrets are masked."""
    return settings.model_dump(mode="json", exclude_defaults=True)
