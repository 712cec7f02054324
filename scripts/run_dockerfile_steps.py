"""Run the steps of Dockerfile-grpc without Docker, in a scratch directory, and serve a model with the result.

What is proven: the copied files are enough to build, what is built serves without the source tree and without the
files that are removed, and ENV, HEALTHCHECK, ENTRYPOINT and CMD are accepted by it. Left out are base images and steps
that need root (useradd). ARGs come from the environment: `TORCH_INDEX=` takes torch from where pip finds it.
"""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MODEL = ROOT / ".models" / "all-MiniLM-L6-v2"
NEEDS_ROOT = ("groupadd", "useradd", "apt-get")
START_SECONDS = 120


def instructions(text: str) -> list[tuple[str, str]]:
    """Return (name, arguments) of each instruction, with continued lines joined and comments left out."""
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    return [(name, arguments.strip()) for name, _, arguments in (line.partition(" ") for line in joined.splitlines())]


class Image:
    """A scratch directory that stands for the file system of the image."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.workdir = root
        self.environment = dict(os.environ)
        self.command: dict[str, list[str]] = {}

    def take(self, name: str, arguments: str) -> None:
        """Carry out one instruction."""
        action = getattr(self, f"take_{name.lower()}", None)
        if action is not None:
            action(arguments)

    def take_arg(self, arguments: str) -> None:
        """Keep the default, unless the caller's environment says otherwise."""
        name, _, default = arguments.partition("=")
        self.environment.setdefault(name, default)

    def take_env(self, arguments: str) -> None:
        """Set variables; paths of the image become paths in the scratch directory."""
        for name, value in re.findall(r"(\w+)=(\S+)", arguments):
            self.environment[name] = self.inside(value).replace("$PATH", self.environment["PATH"])

    def take_workdir(self, arguments: str) -> None:
        """Change directory."""
        self.workdir = Path(self.inside(arguments))
        self.workdir.mkdir(parents=True, exist_ok=True)

    def take_copy(self, arguments: str) -> None:
        """Copy from the repository; what an earlier stage built is in place already."""
        if arguments.startswith("--from"):
            return
        *sources, target = arguments.split()
        for source in sources:
            path = self.workdir / (source if target == "./" else target)
            if (ROOT / source).is_dir():
                shutil.copytree(ROOT / source, path, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copyfile(ROOT / source, path)

    def take_run(self, arguments: str) -> None:
        """Run in a shell."""
        if arguments.startswith(NEEDS_ROOT):
            return
        subprocess.run(["sh", "-ec", self.inside(arguments)], cwd=self.workdir, env=self.environment, check=True)

    def take_entrypoint(self, arguments: str) -> None:
        """Remember."""
        self.command["entrypoint"] = json.loads(arguments)

    def take_cmd(self, arguments: str) -> None:
        """Remember."""
        self.command["cmd"] = json.loads(arguments)

    def take_healthcheck(self, arguments: str) -> None:
        """Remember."""
        self.command["health"] = json.loads(arguments.partition("CMD")[2])

    def inside(self, text: str) -> str:
        """Return `text` with absolute paths moved into the scratch directory."""
        return re.sub(r"(?<![\w/.:])/(opt|src|data)\b", rf"{self.root}/\1", text)

    def output(self, command: list[str], expected: int) -> str:
        """Run the built program and return all that it says."""
        run = subprocess.run(
            command, cwd=self.root, env=self.environment, stdout=-1, stderr=subprocess.STDOUT, text=True, check=False
        )
        if run.returncode != expected:
            sys.exit(f"{command} ended with {run.returncode}, not {expected}:\n{run.stdout}")
        return run.stdout


def check(image: Image) -> None:
    """Ask the image's program: it starts, under both of its names, and it knows its environment."""
    image.environment |= {"MODEL_ID": "", "HOSTNAME": "3f2a9c"}
    program = shutil.which(image.command["entrypoint"][0], path=image.environment["PATH"])
    if program is None or not program.startswith(str(image.root)):
        sys.exit("the entry point is not the one that was built")
    for name in (program, str(Path(program).with_name("text-embeddings-router"))):
        print(image.output([name, "--version"], 0).strip())
    refusal = image.output([program, *image.command["cmd"]], 2)
    if "`--model-id` (MODEL_ID)" not in refusal:
        sys.exit(f"a missing model was not named:\n{refusal}")
    serve(image, program)


def serve(image: Image, program: str) -> None:
    """Start a server, whose port is given by a flag, and wait until the health check finds it serving."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    flags = ["--model-id", str(MODEL), "--hostname", "127.0.0.1", "--port", port, "--prometheus-port", "0"]
    health = [str(Path(program).with_name("tei-grpc")), *image.command["health"][1:-1]]
    with subprocess.Popen([program, *flags], cwd=image.root, env=image.environment) as server:
        try:
            for _ in range(START_SECONDS):
                probed = subprocess.run([*health, str(server.pid)], env=image.environment, check=False)
                if probed.returncode == 0:
                    return
                time.sleep(1)
            sys.exit("the server is not healthy")
        finally:
            server.terminate()


def main() -> None:
    """Build in a scratch directory, check, and clean up."""
    with tempfile.TemporaryDirectory() as scratch:
        image = Image(Path(scratch))
        for name, arguments in instructions((ROOT / "Dockerfile-grpc").read_text()):
            image.take(name, arguments)
        check(image)
    print("Dockerfile-grpc: every step works")


if __name__ == "__main__":
    main()
