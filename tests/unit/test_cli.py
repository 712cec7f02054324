"""The command line: what it takes, what it says, what it imports."""

import subprocess
import sys

import pytest

from tei_grpc import __version__, cli
from tei_grpc.config import Settings


def error(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """Run a command that is refused, and return what it says."""
    try:
        code = cli.main(argv)
    except SystemExit as exit:
        code = exit.code
    assert code == 2
    return capsys.readouterr().err


def test_no_command_means_serve(served: list[Settings]) -> None:
    assert cli.main(["--model-id", "org/model"]) == 0
    assert served[0].model_id == "org/model"


@pytest.mark.parametrize(
    ("argv", "value"),
    [
        (["--auto-truncate"], True),
        (["--auto-truncate", "false"], False),
        (["--auto-truncate=false"], False),
        (["--auto-truncate", "true"], True),
        (["--auto-truncate", "--json-output"], True),
        ([], True),
    ],
)
def test_boolean_is_bare_or_has_a_value(served: list[Settings], argv: list[str], value: bool) -> None:
    cli.main(["--model-id", "org/model", *argv])
    assert served[0].auto_truncate is value


@pytest.mark.parametrize("argv", [["-p", "80"], ["--port", "80"], ["--port=80"]])
def test_port_has_a_short_form(served: list[Settings], argv: list[str]) -> None:
    cli.main(["--model-id", "org/model", *argv])
    assert served[0].port == 80


def test_minus_one_is_a_value(served: list[Settings]) -> None:
    cli.main(["--model-id", "org/model", "--max-recv-message-size", "-1"])
    assert served[0].max_recv_message_size == -1


def test_origin_can_be_repeated(served: list[Settings]) -> None:
    cli.main(["--model-id", "org/model", "--cors-allow-origin", "a", "--cors-allow-origin", "b"])
    assert served[0].cors_allow_origin == ("a", "b")


def test_address_can_be_repeated_and_a_wrong_one_is_named(
    served: list[Settings], capsys: pytest.CaptureFixture[str]
) -> None:
    cli.main(["--model-id", "org/model", "--listen", "127.0.0.1:1", "--listen", "unix:x"])
    assert served[0].listen == ("127.0.0.1:1", "unix:x")
    message = error(capsys, "--model-id", "org/model", "--listen", "127.0.0.1:1", "--listen", "x")
    assert message.endswith("must be HOST:PORT, [HOST]:PORT or unix:PATH, given '127.0.0.1:1, x'\n")


def test_environment_gives_options(served: list[Settings], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MODEL_ID", "org/model")
    monkeypatch.setenv("PORT", "8080")
    cli.main([])
    assert (served[0].model_id, served[0].port) == ("org/model", 8080)


def test_missing_model_is_named_in_one_line(served: list[Settings], capsys: pytest.CaptureFixture[str]) -> None:
    message = error(capsys)
    assert message.startswith("tei-grpc: `--model-id` (MODEL_ID): missing")
    assert len(message.splitlines()) == 1


def test_refused_value_is_named_in_one_line(served: list[Settings], capsys: pytest.CaptureFixture[str]) -> None:
    message = error(capsys, "--model-id", "org/model", "--port", "70000")
    assert message.startswith("tei-grpc: `--port` (PORT): ")
    assert len(message.splitlines()) == 1


@pytest.mark.parametrize("argv", [["--modelid", "x"], ["--model", "x"], ["--modelid=x"]])
def test_unknown_and_shortened_options_are_refused(capsys: pytest.CaptureFixture[str], argv: list[str]) -> None:
    assert f"unknown option `{argv[0].split('=')[0]}`" in error(capsys, *argv)


def test_word_that_is_no_command_is_refused_with_those_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert "`helth` is no command; there are: health, models" in error(capsys, "helth")


def test_stray_value_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert "a value without an option" in error(capsys, "--port", "1", "org/model")


@pytest.mark.parametrize(
    "argv",
    [
        ["--api-key", "SESAME", "--port", "x", "--model-id", "m"],
        ["--api-key", "SESAMEß", "--model-id", "m"],
        ["--api-key", "ok", "SESAME"],
        ["--api-kee", "SESAME"],
        ["--api-kee=SESAME"],
        ["--hf-token", "SESAME", "--hf-api-token", "SESAME", "--model-id", "m"],
    ],
)
def test_error_never_shows_a_secret(capsys: pytest.CaptureFixture[str], argv: list[str]) -> None:
    assert "SESAME" not in error(capsys, *argv)


def test_start_lists_the_options_that_were_given_but_no_secret(
    served: list[Settings], capsys: pytest.CaptureFixture[str]
) -> None:
    cli.main(["--model-id", "org/model", "--api-key", "SESAME", "--hf-api-token", "hf_SESAME", "--json-output"])
    output = capsys.readouterr().out
    assert all(f'"{name}"' in output for name in ("model_id", "api_key", "hf_token", "json_output"))
    assert '"payload_limit"' not in output
    assert "SESAME" not in output


def test_log_level_that_cannot_be_read_is_said(served: list[Settings], capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(["--model-id", "org/model", "--log-level", "loud"])
    assert "`--log-level` (LOG_LEVEL) 'loud' cannot be read; `info` is used" in capsys.readouterr().out


def test_warnings_go_to_the_log(served: list[Settings], capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(["--model-id", "org/model", "--payload-limit", "1"])
    assert "`--payload-limit` has no effect" in capsys.readouterr().out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit:
        cli.main(["--version"])
    assert exit.value.code == 0
    assert capsys.readouterr().out.strip() == f"tei-grpc {__version__}"


def test_help_shows_every_option_with_its_variable(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    text = " ".join(capsys.readouterr().out.split())
    shown = [name for name in Settings.model_fields if f"[env: {name.upper()}]" in text]
    assert shown == [name for name in Settings.model_fields if name != "hf_api_token"]


@pytest.mark.parametrize("argv", [["--help"], ["health", "--address", "127.0.0.1:1", "--timeout", "0.1"]])
def test_command_that_needs_no_model_loads_no_torch(argv: list[str]) -> None:
    program = (
        "import sys, tei_grpc.cli\n"
        "try: tei_grpc.cli.main(sys.argv[1:])\n"
        "except SystemExit: pass\n"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules"
    )
    run = subprocess.run([sys.executable, "-c", program, *argv], capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize(
    ("environ", "address"),
    [
        ({}, "127.0.0.1:3000"),
        ({"PORT": "80"}, "127.0.0.1:80"),
        ({"PORT": "tcp://10.0.0.1:80"}, "127.0.0.1:3000"),
        ({"UDS_LISTEN": "/run/tei.sock", "PORT": "80"}, "unix:/run/tei.sock"),
        ({"HEALTH_PORT": "81", "UDS_LISTEN": "/run/tei.sock", "PORT": "80"}, "127.0.0.1:81"),
        ({"HEALTH_PORT": "tcp://10.0.0.1:81", "PORT": "80"}, "127.0.0.1:80"),
    ],
)
def test_probe_asks_the_address_of_the_environment(environ: dict[str, str], address: str) -> None:
    assert cli._local_address(environ) == address


@pytest.mark.parametrize("before", [[], ["--", "tei-grpc"]])
def test_probe_asks_where_the_flags_of_the_process_say(before: list[str]) -> None:
    flags = ["--json-output", "--port", "8080", "--model-id=org/model"]
    program = [sys.executable, "-c", "print(flush=True), input()", *before, *flags]
    with subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        given = cli._flags_of(process.pid)
        process.communicate(b"\n")
    assert cli._local_address({"PORT": "80"} | given) == "127.0.0.1:8080"


def test_process_that_is_gone_has_no_flags() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    assert cli._flags_of(process.pid) == {}
