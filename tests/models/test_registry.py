"""Which family serves a checkpoint."""

import pytest

from tei_grpc import models
from tei_grpc.errors import StartupError
from tei_grpc.models import Model, find_family, model_types, register


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Families that a test enters are forgotten after it."""
    model_types()
    monkeypatch.setattr(models, "_entries", list(models._entries))


@pytest.mark.parametrize(
    ("model_type", "family"),
    [("bert", "Bert"), ("roberta", "Roberta"), ("xlm-roberta", "Roberta"), ("camembert", "Roberta")],
)
def test_family_is_found_by_model_type(model_type: str, family: str) -> None:
    assert find_family({"model_type": model_type}).__name__ == family


@pytest.mark.parametrize("config", [{"model_type": "bart"}, {}])
def test_unknown_model_type_is_refused_with_those_that_are_known(config: dict[str, str]) -> None:
    with pytest.raises(StartupError, match=r"is not supported; supported are: .*bert.*xlm-roberta"):
        find_family(config)


def test_family_that_looks_closer_is_preferred(registry: None) -> None:
    @register("bert", matches=lambda config: "alibi" in config)
    class Alibi(Model): ...

    assert find_family({"model_type": "bert", "alibi": True}) is Alibi
    assert find_family({"model_type": "bert"}) is not Alibi
