"""Which family serves a checkpoint."""

import pytest

from tei_grpc import models
from tei_grpc.models import Model, families, find_family, model_types, register


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


@pytest.mark.parametrize("config", [{"model_type": "albert"}, {}])
def test_model_type_without_a_family_is_left_to_the_generic_path(config: dict[str, str]) -> None:
    assert find_family(config) is None


def test_families_are_listed_with_each_model_type_they_serve() -> None:
    listed = [(name, family.__name__) for name, family in families()]
    assert {("bert", "Bert"), ("bert", "JinaBert"), ("xlm-roberta", "Roberta")} <= set(listed)
    assert listed == sorted(listed)


def test_family_that_looks_closer_is_preferred(registry: None) -> None:
    @register("bert", matches=lambda config: "alibi" in config)
    class Alibi(Model): ...

    assert find_family({"model_type": "bert", "alibi": True}) is Alibi
    assert find_family({"model_type": "bert"}) is not Alibi
