"""Dockerfile-grpc, as far as it can be tried without Docker."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "run_dockerfile_steps.py"


@pytest.mark.slow
def test_every_step_works() -> None:
    run = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True, timeout=1200)
    assert run.returncode == 0, run.stdout + run.stderr
