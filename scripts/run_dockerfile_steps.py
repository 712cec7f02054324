"""Run the steps of Dockerfile-grpc without Docker, in a scratch directory, and ask the result for its version.

What is proven: the copied files are enough to build, the installed package works without the source tree, and ENV,
HEALTHCHECK, ENTRYPOINT and CMD are accepted by it. Left out are base images and steps that need root (useradd).
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NEEDS_ROOT = ("useradd", "apt-get")


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
    """Ask the image's program: it starts, it knows its environment, and its probe asks the right port."""
    image.environment |= {"MODEL_ID": "", "HOSTNAME": "3f2a9c"}
    program = shutil.which(image.command["entrypoint"][0], path=image.environment["PATH"])
    if program is None or not program.startswith(str(image.root)):
        sys.exit("the entry point is not the one that was built")
    print(image.output([program, "--version"], 0).strip())
    refusal = image.output([program, *image.command["cmd"]], 2)
    if "`--model-id` (MODEL_ID)" not in refusal:
        sys.exit(f"a missing model was not named:\n{refusal}")
    probe = image.output([program, *image.command["health"][1:]], 1)
    if not probe.startswith(f"127.0.0.1:{image.environment['PORT']}: UNAVAILABLE"):
        sys.exit(f"the health check asked elsewhere:\n{probe}")


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
