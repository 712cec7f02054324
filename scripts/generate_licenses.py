"""Write docs/licenses.md: what is installed with tei-grpc, under which licence; --check fails for one not allowed here.

The list is that of the machine it is made on: other versions and platforms bring other packages, so `--check` looks at
what is installed and not at the list.
"""

import argparse
import re
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

LIST = Path(__file__).resolve().parent.parent / "docs" / "licenses.md"
EXTRAS = ("generic", "verify", "otel")
HEAD = """# Licences of dependencies

What `pip install 'tei-grpc[generic,verify,otel]'` brings along, with torch for CPUs. Written by `make licenses`, on
Linux; `make lint` fails when a dependency has a licence that is not among those that the script allows. torch with CUDA
adds libraries of NVIDIA, under NVIDIA's own licences.

| package | licence | needed for |
|---|---|---|
"""

ALLOWED = {
    *("0BSD", "Apache-2.0", "Apache-2.0 WITH LLVM-exception", "BSD-2-Clause", "BSD-3-Clause", "BSL-1.0", "CC0-1.0"),
    *("CNRI-Python", "ISC", "MIT", "MIT-CMU", "MPL-2.0", "PSF-2.0", "Zlib"),
}
SPDX = {  # what packages say that do not say it in SPDX's words
    "3-Clause BSD License": "BSD-3-Clause",
    "Apache 2.0 License": "Apache-2.0",
    "Apache License 2.0": "Apache-2.0",
    "Apache Software License": "Apache-2.0",
    "BSD License": "BSD-3-Clause",
    "ISC License (ISCL)": "ISC",
    "MIT License": "MIT",
    "Mozilla Public License 2.0 (MPL 2.0)": "MPL-2.0",
    "Python Software Foundation License": "PSF-2.0",
}
OF_CUDA = ("nvidia-", "cuda-")  # packages that torch needs on GPUs


def dependencies() -> dict[str, set[str]]:
    """Every installed package that tei-grpc needs, with the extras that it is needed for; none: it always is."""
    found: dict[str, set[str]] = {}
    for extra in ("", *EXTRAS):
        for name in _closure("tei-grpc", extra):
            found.setdefault(name, set()).add(extra)
    return {name: set() if "" in extras else extras for name, extras in found.items() if name != "tei-grpc"}


def _closure(root: str, extra: str) -> set[str]:
    found: set[tuple[str, str]] = set()
    waiting = {(root, extra)}
    while waiting:
        found |= waiting
        waiting = {need for package in waiting for need in _needs(*package)} - found
    return {name for name, _ in found}


def _needs(name: str, extra: str) -> Iterator[tuple[str, str]]:
    for text in metadata.distribution(name).requires or []:
        requirement = Requirement(text)
        if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
            needed = re.sub(r"[-_.]+", "-", requirement.name).lower()
            yield from ((needed, wanted) for wanted in ("", *requirement.extras))


def license_of(name: str) -> str:
    """The licence that an installed package names, in SPDX's words where they are known."""
    described = metadata.metadata(name)
    classifiers = described.get_all("Classifier") or []
    named = [text.rpartition(" :: ")[2] for text in classifiers if text.startswith("License :: ")]
    stated: str = [*described.get_all("License-Expression", []), *named, *described.get_all("License", []), "none"][0]
    return SPDX.get(stated, stated)


def is_allowed(name: str, stated: str) -> bool:
    """Say whether all parts of a licence expression are allowed, or one of its alternatives."""
    alternatives = (re.split(r" AND ", part) for part in stated.strip("()").split(" OR "))
    return name.startswith(OF_CUDA) or any(ALLOWED.issuperset(parts) for parts in alternatives)


def main() -> None:
    """Write or check."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="look for licences that are not allowed; write nothing")
    needed = dependencies()
    refused = [f"{name}: {license_of(name)}" for name in needed if not is_allowed(name, license_of(name))]
    if refused:
        sys.exit("licences that scripts/generate_licenses.py does not allow: " + "; ".join(refused))
    if not parser.parse_args().check:
        rows = (f"| {name} | {license_of(name)} | {', '.join(sorted(needed[name]))} |\n" for name in sorted(needed))
        LIST.write_text(HEAD + "".join(rows))


if __name__ == "__main__":
    main()
