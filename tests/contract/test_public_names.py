"""What `tei_grpc` offers by name, and what importing it costs."""

import subprocess
import sys

import tei_grpc

NAMES = ["Caller", "Engine", "EngineConfig", "Input", "Scoring", "TeiError", "__version__"]


def test_public_names_are_these() -> None:
    assert sorted(tei_grpc.__all__) == sorted(NAMES)
    for name in NAMES:
        assert getattr(tei_grpc, name) is not None


def test_unknown_name_is_an_attribute_error() -> None:
    assert not hasattr(tei_grpc, "nonsense")


def test_engine_can_be_imported_without_torch() -> None:
    code = "import sys; from tei_grpc import Engine, EngineConfig; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
