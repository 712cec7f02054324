"""Generate the stubs of proto/tei.proto for the server and the Python client; --check fails when they are stale.

Run with grpcio-tools 1.76 (`make proto` sees to it): generated code needs a protobuf runtime at least as new as its
generator, so the generator's age is the floor for everybody who installs the client. Both copies register the same file
name and the same bytes, hence protobuf hands out one set of classes when both are imported into one process.
"""

import argparse
import sys
import tempfile
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent
TARGETS = (ROOT / "tei_grpc" / "pb", ROOT / "clients" / "python" / "tei_client" / "pb")
ABSOLUTE_IMPORT = "\nimport tei_pb2 as tei__pb2\n"
RELATIVE_IMPORT = "\nfrom . import tei_pb2 as tei__pb2\n"


def generate(folder: Path) -> None:
    """Write tei_pb2.py, tei_pb2.pyi and tei_pb2_grpc.py into `folder`."""
    outputs = [f"--python_out={folder}", f"--pyi_out={folder}", f"--grpc_python_out={folder}"]
    if protoc.main(["protoc", f"-I{ROOT / 'proto'}", *outputs, "tei.proto"]):
        raise SystemExit("protoc failed")
    stub = folder / "tei_pb2_grpc.py"  # protoc writes an absolute import, which only works on top of sys.path
    text = stub.read_text()
    if ABSOLUTE_IMPORT not in text:
        raise SystemExit(f"{stub.name}: expected import line not found")
    stub.write_text(text.replace(ABSOLUTE_IMPORT, RELATIVE_IMPORT, 1))


def main() -> None:
    """Generate, then write or compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    check = parser.parse_args().check
    with tempfile.TemporaryDirectory() as scratch:
        generate(Path(scratch))
        for new in sorted(Path(scratch).iterdir()):
            for target in (folder / new.name for folder in TARGETS):
                if not check:
                    target.write_bytes(new.read_bytes())
                elif not target.exists() or target.read_bytes() != new.read_bytes():
                    sys.exit(f"{target.relative_to(ROOT)} is stale: run `make proto`")


if __name__ == "__main__":
    main()
