"""What a test needs of the machine beside Python's packages."""

import os

import pytest


def need(found: object, reason: str) -> None:
    """Skip the test where it is not there; fail it in CI, where everything has to be."""
    if not found:
        pytest.fail(reason) if os.environ.get("CI") == "true" else pytest.skip(reason)
