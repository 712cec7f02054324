"""One definition per option: field name, flag, environment name, default, type and help.

A field `max_batch_tokens` is the flag `--max-batch-tokens` and the environment name `MAX_BATCH_TOKENS`. Fields are
grouped in classes whose docstring is the group's title in `--help` and in the docs. `load` turns flags and environment
into `Settings`, an EngineConfig and a ServerConfig in one. Constructing these classes by hand reads no environment.
"""

import ipaddress
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

import pydantic
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, SecretStr

from tei_grpc.errors import StartupError


def _check_ip(text: str) -> str:
    try:
        return str(ipaddress.ip_address(text.removeprefix("[").removesuffix("]")))
    except ValueError:
        raise ValueError("must be an IP address, like 0.0.0.0 or ::1") from None


def _check_device(text: str) -> str:
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?|mps", text):
        raise ValueError("must be auto, cpu, cuda, cuda:N or mps")
    return text


def _check_message_size(size: int) -> int:
    if size == 0:
        raise ValueError("must be positive, or -1 for no limit")
    return size


def _check_key(key: SecretStr) -> SecretStr:
    text = key.get_secret_value()
    if not text or not text.isascii() or not text.isprintable():
        raise ValueError("must be a non-empty key of printable ASCII; leave it out to serve without a key")
    return key


def _refuse(_: object) -> object:
    raise ValueError("not available in this version")


def _none_if_empty(value: object) -> object:
    return None if value == "" else value


def _one_or_many(value: object) -> object:
    return (value,) if isinstance(value, str) else value


Count = Annotated[int, Field(gt=0)]
Port = Annotated[int, Field(ge=0, le=65535)]
Device = Annotated[str, AfterValidator(_check_device)]
IpLiteral = Annotated[str, AfterValidator(_check_ip)]
MessageSize = Annotated[int, Field(ge=-1, le=2**31 - 1), AfterValidator(_check_message_size)]
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
ApiKey = Annotated[SecretStr, AfterValidator(_check_key)]
HubToken = Annotated[SecretStr | None, BeforeValidator(_none_if_empty)]
Refused = Annotated[str | None, AfterValidator(_refuse)]
Texts = Annotated[tuple[str, ...], BeforeValidator(_one_or_many)]


class OptionGroup(BaseModel):
    """Options that belong together."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True, protected_namespaces=())


class ModelOptions(OptionGroup):
    """Model"""

    model_id: str = Field(min_length=1, description="model to serve: a Hugging Face Hub id, or a local directory")
    revision: str | None = Field(None, description="branch, tag or commit on the Hub")
    dtype: Literal["float32", "bfloat16"] | None = Field(
        None, description="float32 or bfloat16: type of weights and activations; float32 when left out"
    )
    device: Device = Field("auto", description="auto, cpu, cuda, cuda:N or mps; this version has the CPU only")
    pooling: Literal["cls", "mean", "splade", "last-token"] | None = Field(
        None, description="cls, mean, splade or last-token: how token vectors become one; the model's own when left out"
    )
    lora_task: str | None = Field(
        None, description="name of the model's LoRA adaptation; its weights without any when left out"
    )
    dense_path: Refused = Field(None, description="directory of the Dense module; not available in this version")
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
    tokenization_workers: Count | None = Field(
        None, description="tokenizer threads; one less than the CPU cores when left out"
    )
    split_special_tokens: bool = Field(False, description="read the text of a special token in an input as plain text")


class ListenerOptions(OptionGroup):
    """Server"""

    hostname: IpLiteral = Field("0.0.0.0", description="IP address to listen on")  # noqa: S104 - containers need it
    port: Port = Field(3000, description="gRPC port; 0 takes a free one")
    uds_listen: Path | None = Field(None, description="Unix socket to listen on instead of the port")
    api_key: ApiKey | None = Field(None, description="key that callers send as `authorization: Bearer KEY`")
    api_key_file: Path | None = Field(None, description="file of further keys, one a line")
    max_recv_message_size: MessageSize = Field(4194304, description="bytes of the largest request; -1: no limit")
    max_send_message_size: MessageSize = Field(-1, description="bytes of the largest response; -1: no limit")
    grpc_max_parallel_stream_requests: Count = Field(1024, description="messages of one stream in work at a time")
    shutdown_grace: Seconds = Field(30.0, description="seconds that running calls get to finish at shutdown")
    shutdown_delay: Seconds = Field(0.0, description="seconds to go on serving, with health NOT_SERVING, before that")


class ObservabilityOptions(OptionGroup):
    """Logs and metrics"""

    log_level: str = Field("info", description="`info`, or by module: `info,tei_grpc.engine=debug`")
    json_output: bool = Field(False, description="one JSON object per log line")
    disable_spans: bool = Field(False, description="leave the span of a request out of JSON log lines")
    prometheus_port: Port = Field(9000, description="port of the metrics; 0 turns them off")
    otlp_endpoint: Refused = Field(None, description="OpenTelemetry collector; not available in this version")


class InertOptions(OptionGroup):
    """Accepted for compatibility, without effect"""

    uds_path: str | None = Field(None, description="socket of a separate model process; there is none")
    payload_limit: int | None = Field(None, description="HTTP only; see `--max-recv-message-size`")
    cors_allow_origin: Texts = Field((), description="HTTP only")
    served_model_name: str | None = Field(None, description="HTTP only")
    otlp_service_name: str | None = Field(None, description="traces only; not available in this version")


class EngineConfig(ModelOptions, RequestOptions):
    """What the engine needs to know."""

    @pydantic.model_validator(mode="after")
    def _one_default_prompt(self) -> "EngineConfig":
        if self.default_prompt is not None and self.default_prompt_name is not None:
            raise ValueError("`--default-prompt` and `--default-prompt-name` exclude each other; give one")
        return self


class ServerConfig(ListenerOptions, ObservabilityOptions, InertOptions):
    """What the front door needs to know."""

    def api_keys(self) -> tuple[str, ...]:
        """Return all accepted keys; none means open to everybody. Raises StartupError when the file gives no key."""
        given = () if self.api_key is None else (self.api_key.get_secret_value(),)
        return given + (() if self.api_key_file is None else _read_keys(self.api_key_file))


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


def load(flags: Mapping[str, object], environ: Mapping[str, str]) -> tuple[Settings, list[str]]:
    """Build the settings from given flags (by field name) and the environment; flags win.

    Returns the settings and what the user should be warned of. Raises StartupError with one line per refused option.
    """
    environment, warnings = _read_environment(environ)
    try:
        settings = Settings.model_validate({**environment, **flags})
    except pydantic.ValidationError as error:
        raise StartupError("\n".join(_explain(error, {**environment, **flags}))) from None
    return settings, warnings + _warn_of_inert(settings)


def describe(settings: BaseModel) -> dict[str, object]:
    """Return every option's value, fit for a log: secrets are masked."""
    return settings.model_dump(mode="json")


def _read_environment(environ: Mapping[str, str]) -> tuple[dict[str, str], list[str]]:
    """Pick our options; leave out values that the platform put there for its own purposes."""
    given = {name: environ[name.upper()] for name in Settings.model_fields if name.upper() in environ}
    warnings = []
    if "hostname" in given and not _is_valid("hostname", given["hostname"]):
        del given["hostname"]  # containers set HOSTNAME to their own name: no reason for a warning
    for name in ("port", "prometheus_port"):
        if given.get(name, "").startswith("tcp://"):  # Kubernetes describes a service called `prometheus` this way
            warnings.append(f"{name.upper()}={given.pop(name)} from the environment is not a port: ignored")
    name = "grpc_max_parallel_stream_requests"
    if name in given and not _is_valid(name, given[name]):
        text, default = given.pop(name), Settings.model_fields[name].default
        warnings.append(f"{name.upper()}={text} from the environment is not a positive number: using {default}")
    return given, warnings


def _is_valid(name: str, value: str) -> bool:
    try:
        ServerConfig.model_validate({name: value})
    except pydantic.ValidationError:
        return False
    return True


def _warn_of_inert(settings: Settings) -> list[str]:
    inert = [name for name in InertOptions.model_fields if name in settings.model_fields_set]
    warnings = [f"`{flag(name)}` has no effect: {Settings.model_fields[name].description}" for name in inert]
    if settings.hf_api_token is not None:
        warnings.append("`--hf-api-token` is deprecated: use `--hf-token`")
    return warnings


def _explain(error: pydantic.ValidationError, given: Mapping[str, object]) -> list[str]:
    errors = error.errors(include_url=False, include_input=False, include_context=False)
    return [_explain_one(str(e["loc"][0]) if e["loc"] else "", e["msg"], given) for e in errors]


def _explain_one(name: str, reason: str, given: Mapping[str, object]) -> str:
    reason = reason.removeprefix("Value error, ")
    if not name:
        return reason
    option = f"`{flag(name)}` ({name.upper()})"
    if name not in given:
        return f"{option}: missing; {Settings.model_fields[name].description}"
    if "Secret" in str(Settings.model_fields[name].annotation):
        return f"{option}: {reason}"
    return f"{option}: {reason[:1].lower()}{reason[1:]}, given {str(given[name])!r}"


def _read_keys(path: Path) -> tuple[str, ...]:
    option = "`--api-key-file` (API_KEY_FILE)"
    try:
        keys = tuple(filter(None, (line.strip() for line in path.read_text(encoding="utf-8").splitlines())))
    except (OSError, UnicodeDecodeError) as error:
        raise StartupError(f"{option}: cannot read {str(path)!r}: {type(error).__name__}") from None
    if not keys or not all(key.isascii() and key.isprintable() for key in keys):
        raise StartupError(f"{option}: {str(path)!r} must hold keys of printable ASCII, one a line")
    return keys
