"""Dockerfile-grpc, and what `docker run` would start from it: a program, its arguments and its environment."""

import argparse
import json
import re
import shlex
from pathlib import Path
from typing import NamedTuple

from scripts.run_dockerfile_steps import instructions
from tests.deploy.manifests import ROOT

VALUED = ["-m", "--memory", "-u", "--user", "--entrypoint", "--name", "--pull", "--gpus", "--runtime", "--platform"]
VALUED += ["--shm-size", "--restart", "--network", "--ipc", "--cpus"]


class Image(NamedTuple):
    """What an image says about its process."""

    environment: dict[str, str]
    entrypoint: list[str]
    command: list[str]
    health: list[str]
    names: list[str]  # of the program


class Process(NamedTuple):
    """What Docker starts."""

    argv: list[str]
    environment: dict[str, str]
    ports: dict[int, int]  # of the container: of the host
    volumes: dict[str, str]  # of the container: of the host


def read_image() -> Image:
    """Variables that need Docker to work out their value are left out."""
    image = Image({}, [], [], [], re.findall(r"ln -s (\S+) /opt/tei-grpc/bin/(\S+)", _text())[0])
    for name, arguments in instructions(_text()):
        if name == "ENV":
            image.environment.update(pair for pair in re.findall(r"(\w+)=(\S+)", arguments) if "$" not in pair[1])
        if name in ("ENTRYPOINT", "CMD"):
            (image.entrypoint if name == "ENTRYPOINT" else image.command).extend(json.loads(arguments))
        if name == "HEALTHCHECK":
            image.health.extend(json.loads(arguments.partition("CMD")[2]))
    return image


def _text() -> str:
    return (ROOT / "Dockerfile-grpc").read_text()


def _parser() -> argparse.ArgumentParser:
    """The part of Docker's options that people use."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for flags in (["-d", "--detach"], ["-i"], ["-t"], ["--rm"], ["--init"]):
        parser.add_argument(*flags, action="store_true")
    for flags in (["-e", "--env"], ["-p", "--publish"], ["-v", "--volume"]):
        parser.add_argument(*flags, action="append", default=[])
    for flag in VALUED:
        parser.add_argument(flag)
    parser.add_argument("image")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    return parser


def docker_run(line: str) -> Process:
    """Read `docker run ...` as Docker does. The image that it names is taken to be ours."""
    words = shlex.split(line.replace("\\\n", " "))
    assert words[:2] == ["docker", "run"]
    given = _parser().parse_args(words[2:])
    image = read_image()
    entrypoint = image.entrypoint if given.entrypoint is None else [given.entrypoint]
    assert Path(entrypoint[0]).name in image.names, f"there is no {entrypoint[0]} in the image"
    command = given.arguments or (image.command if given.entrypoint is None else [])
    environment = image.environment | {"HOSTNAME": "3f2a9c81d07b"} | dict(text.split("=", 1) for text in given.env)
    ports = {int(inner): int(outer) for outer, inner in (text.split(":")[-2:] for text in given.publish)}
    volumes = {parts[1]: parts[0] for parts in (text.split(":") for text in given.volume)}
    return Process([*entrypoint, *command], environment, ports, volumes)
