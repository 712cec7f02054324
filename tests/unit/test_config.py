"""Options: names, defaults, limits, and what is said about wrong ones."""

from pathlib import Path

import pytest

from tei_grpc.config import GROUPS, EngineConfig, ServerConfig, Settings, describe
from tei_grpc.errors import StartupError
from tei_grpc.invocation import load

MODEL = {"model_id": "org/model"}

# what people who move from text-embeddings-inference have in their deployments
TEI_DEFAULTS = {
    "revision": None,
    "tokenization_workers": None,
    "dtype": None,
    "served_model_name": None,
    "pooling": None,
    "max_concurrent_requests": 512,
    "max_batch_tokens": 16384,
    "max_batch_requests": None,
    "max_client_batch_size": 32,
    "auto_truncate": True,
    "default_prompt_name": None,
    "default_prompt": None,
    "dense_path": None,
    "hf_api_token": None,
    "hf_token": None,
    "hostname": "0.0.0.0",
    "port": 3000,
    "huggingface_hub_cache": None,
    "api_key": None,
    "json_output": False,
    "disable_spans": False,
    "otlp_endpoint": None,
    "otlp_service_name": "text-embeddings-inference.server",
    "prometheus_port": 9000,
}


def refusal(flags: dict[str, object], environ: dict[str, str] | None = None) -> str:
    with pytest.raises(StartupError) as caught:
        load({**MODEL, **flags}, environ or {})
    return caught.value.message


def test_defaults_are_those_of_tei() -> None:
    settings, warnings = load(MODEL, {})
    assert {name: getattr(settings, name) for name in TEI_DEFAULTS} == TEI_DEFAULTS
    assert warnings == []


def test_every_option_is_in_one_group_of_the_help() -> None:
    grouped = [name for group in GROUPS for name in group.model_fields]
    assert sorted([*grouped, "hf_api_token"]) == sorted(Settings.model_fields)


def test_every_option_is_described() -> None:
    assert [name for name, field in Settings.model_fields.items() if not field.description] == []


def test_settings_serve_as_both_configurations() -> None:
    settings, _ = load(MODEL, {})
    assert isinstance(settings, EngineConfig)
    assert isinstance(settings, ServerConfig)


def test_environment_name_is_the_option_in_upper_snake_case() -> None:
    settings, _ = load({}, {"MODEL_ID": "org/model", "MAX_BATCH_TOKENS": "8", "AUTO_TRUNCATE": "false"})
    assert (settings.model_id, settings.max_batch_tokens, settings.auto_truncate) == ("org/model", 8, False)


def test_lower_case_environment_names_are_not_ours() -> None:
    assert load(MODEL, {"port": "1"})[0].port == 3000


def test_flag_wins_over_the_environment() -> None:
    assert load({**MODEL, "port": "1"}, {"PORT": "2"})[0].port == 1


def test_missing_model_names_flag_and_variable() -> None:
    with pytest.raises(StartupError, match=r"^`--model-id` \(MODEL_ID\): missing"):
        load({}, {})


@pytest.mark.parametrize(
    ("name", "value", "limit"),
    [
        ("port", "70000", "65535"),
        ("port", "http", "integer"),
        ("prometheus_port", "-1", "0"),
        ("max_batch_tokens", "0", "greater than 0"),
        ("dtype", "float8", "'float32', 'float16', 'bfloat16' or 'int8'"),
        ("pooling", "max", "'cls', 'mean', 'splade' or 'last-token'"),
        ("device", "tpu", "auto, cpu, cuda, cuda:N or mps"),
        ("hostname", "localhost", "IP address"),
        ("auto_truncate", "maybe", "boolean"),
        ("max_recv_message_size", "0", "positive, or -1"),
        ("shutdown_grace", "nan", "finite"),
        ("shutdown_delay", "-1", "greater than or equal to 0"),
        ("health_port", "65536", "65535"),
        ("listen", "localhost:80", "IP address"),
        ("listen", "127.0.0.1", "HOST:PORT"),
        ("listen", "127.0.0.1:65536", "HOST:PORT"),
        ("listen", "127.0.0.1:-1", "HOST:PORT"),
        ("listen", "::1:80", "HOST:PORT"),
        ("listen", ":80", "HOST:PORT"),
        ("listen", "unix:", "unix:PATH"),
        ("max_connection_age", "0", "0.001"),
        ("max_connection_age", "inf", "2000000"),
        ("max_connection_age", "nan", "2000000"),
        ("max_connection_age_grace", "-1", "greater than or equal to 0"),
        ("otlp_endpoint", "localhost:4317", "http://HOST:4317"),
    ],
)
def test_refused_value_is_named_with_option_and_limit(name: str, value: str, limit: str) -> None:
    message = refusal({name: value})
    assert message.startswith(f"`--{name.replace('_', '-')}` ({name.upper()}): ")
    assert limit in message
    assert f"given '{value}'" in message


@pytest.mark.parametrize("value", ["auto", "cpu", "cuda", "cuda:1", "mps"])
def test_devices(value: str) -> None:
    assert load({**MODEL, "device": value}, {})[0].device == value


@pytest.mark.parametrize(("environment", "expected"), [({}, True), ({"USE_FLASH_ATTENTION": "false"}, False)])
def test_flash_attention_is_turned_off_as_in_tei(environment: dict[str, str], expected: bool) -> None:
    assert load(MODEL, environment)[0].use_flash_attention is expected


def test_every_wrong_option_has_a_line_of_its_own() -> None:
    assert len(refusal({"port": "x", "dtype": "y"}).splitlines()) == 2


def test_default_prompt_and_its_name_exclude_each_other() -> None:
    message = refusal({"default_prompt": "a"}, {"DEFAULT_PROMPT_NAME": "b"})
    assert message == "`--default-prompt` and `--default-prompt-name` exclude each other; give one"


def test_old_and_new_token_exclude_each_other() -> None:
    assert "`--hf-api-token` and `--hf-token` exclude" in refusal({"hf_token": "a", "hf_api_token": "b"})


def test_old_token_still_works_with_a_warning() -> None:
    settings, warnings = load(MODEL, {"HF_API_TOKEN": "hf_x"})
    assert settings.hf_token is not None
    assert settings.hf_token.get_secret_value() == "hf_x"
    assert warnings == ["`--hf-api-token` is deprecated: use `--hf-token`"]


def test_empty_token_in_the_environment_is_none() -> None:
    assert load(MODEL, {"HF_TOKEN": ""})[0].hf_token is None


@pytest.mark.parametrize("name", ["uds_path", "payload_limit", "cors_allow_origin", "served_model_name"])
def test_option_without_effect_is_accepted_with_one_warning(name: str) -> None:
    _, warnings = load({**MODEL, name: "1"}, {})
    assert len(warnings) == 1
    assert f"`--{name.replace('_', '-')}` has no effect" in warnings[0]


def test_hostname_of_a_container_is_ignored_silently() -> None:
    settings, warnings = load(MODEL, {"HOSTNAME": "tei-7f9c6d"})
    assert (settings.hostname, warnings) == ("0.0.0.0", [])


@pytest.mark.parametrize(("text", "hostname"), [("127.0.0.1", "127.0.0.1"), ("[::1]", "::1"), ("::", "::")])
def test_hostname_from_the_environment_counts_when_it_is_an_address(text: str, hostname: str) -> None:
    assert load(MODEL, {"HOSTNAME": text})[0].hostname == hostname


@pytest.mark.parametrize("name", ["PORT", "HEALTH_PORT", "PROMETHEUS_PORT"])
def test_address_that_kubernetes_puts_in_a_port_variable_is_ignored_with_a_warning(name: str) -> None:
    settings, warnings = load(MODEL, {name: "tcp://10.0.0.1:9090"})
    assert (settings.port, settings.health_port, settings.prometheus_port) == (3000, None, 9000)
    assert len(warnings) == 1
    assert name in warnings[0]


def test_further_addresses_come_one_by_one_or_separated_by_commas() -> None:
    addresses = ("127.0.0.1:1", "[::1]:2", "unix:/run/tei.sock")
    assert load({**MODEL, "listen": list(addresses)}, {})[0].listen == addresses
    assert load(MODEL, {"LISTEN": ",".join(addresses)})[0].listen == addresses


@pytest.mark.parametrize("given", [{"uds_listen": "/run/tei.sock"}, {"listen": ["127.0.0.1:1", "unix:/run/tei.sock"]}])
def test_unix_sockets_cannot_be_shared_by_front_ends(given: dict[str, object]) -> None:
    load({**MODEL, **given}, {})
    assert "`--frontends` share ports, but a Unix socket cannot be shared" in refusal({**given, "frontends": "2"})


@pytest.mark.parametrize(
    ("given", "missing"),
    [
        ({"tls_cert": "c"}, "`--tls-cert` needs `--tls-key`, too"),
        ({"tls_key": "k"}, "`--tls-key` needs `--tls-cert`, too"),
        ({"tls_client_ca": "a"}, "`--tls-client-ca` needs `--tls-cert`, too"),
        ({"max_connection_age_grace": "1"}, "`--max-connection-age-grace` needs `--max-connection-age`, too"),
    ],
)
def test_option_that_is_nothing_alone_is_refused(given: dict[str, object], missing: str) -> None:
    assert refusal(given) == missing


def test_bad_stream_window_in_the_environment_means_the_default_with_a_warning() -> None:
    settings, warnings = load(MODEL, {"GRPC_MAX_PARALLEL_STREAM_REQUESTS": "many"})
    assert settings.grpc_max_parallel_stream_requests == 1024
    assert len(warnings) == 1


@pytest.mark.parametrize("key", ["", "geheim\n", "schlüssel"])
def test_key_that_no_caller_could_send_is_refused_without_showing_it(key: str) -> None:
    message = refusal({"api_key": key})
    assert "`--api-key` (API_KEY): must be" in message
    assert not key or key not in message


def test_keys_come_from_option_and_file(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("two\n\n  three \r\n")
    settings, _ = load({**MODEL, "api_key": "one", "api_key_file": str(file)}, {})
    assert settings.api_keys() == ("one", "two", "three")


def test_no_key_means_open_to_everybody() -> None:
    assert load(MODEL, {})[0].api_keys() == ()


@pytest.mark.parametrize("content", [b"", b"\n \n", b"\xff\xfe", "schlüssel".encode()])
def test_key_file_without_usable_keys_is_refused(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "keys"
    file.write_bytes(content)
    with pytest.raises(StartupError, match="--api-key-file"):
        load({**MODEL, "api_key_file": str(file)}, {})[0].api_keys()


def test_missing_key_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"cannot read .*FileNotFoundError"):
        load({**MODEL, "api_key_file": str(tmp_path / "none")}, {})[0].api_keys()


def test_secrets_are_masked_wherever_settings_are_shown() -> None:
    secrets = {"api_key": "SESAME", "hf_api_token": "hf_SESAME"}
    settings, warnings = load({**MODEL, **secrets}, {})
    assert "SESAME" not in f"{settings!r} {settings} {describe(settings)} {warnings} {settings.model_dump_json()}"


def test_constructing_settings_reads_no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PORT", "1")
    assert Settings(model_id="org/model").port == 3000


def test_unknown_option_is_refused() -> None:
    with pytest.raises(ValueError, match="Extra inputs"):
        Settings.model_validate({**MODEL, "no_such_option": 1})
