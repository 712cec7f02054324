"""What a user gave, as flags and in the environment: `load` makes settings of it, or says what is wrong with it."""

from collections.abc import Mapping

import pydantic

from tei_grpc.config import InertOptions, ServerConfig, Settings, flag
from tei_grpc.errors import StartupError


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


def _read_environment(environ: Mapping[str, str]) -> tuple[dict[str, str], list[str]]:
    """Pick our options; leave out values that the platform put there for its own purposes."""
    given = {name: environ[name.upper()] for name in Settings.model_fields if name.upper() in environ}
    warnings = []
    if "hostname" in given and not _is_valid("hostname", given["hostname"]):
        del given["hostname"]  # containers set HOSTNAME to their own name: no reason for a warning
    for name in ("port", "health_port", "prometheus_port"):
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
    value = given[name]
    text = ", ".join(value) if isinstance(value, list) else str(value)
    return f"{option}: {reason[:1].lower()}{reason[1:]}, given {text!r}"
