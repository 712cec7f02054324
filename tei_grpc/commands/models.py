"""`tei-grpc models`: which models run on the packed path, straight from the registry."""

import json

from tei_grpc.models import Head, Model, families

HEADS = {Head.NONE: ("embedding",), Head.CLASSIFICATION: ("classification", "reranking"), Head.MASKED_LM: ("splade",)}
COLUMNS = ("model_type", "family", "path", "serves")
NOTE = "All other architectures that transformers knows run on the generic path (pip install 'tei-grpc[generic]')."


def serves(family: type[Model]) -> list[str]:
    """What a family's heads are for."""
    return [use for head, uses in HEADS.items() if head in family.heads for use in uses]


def show(*, as_json: bool) -> int:
    """Print every `model_type` with its family and what it serves; return 0."""
    rows = [(name, family.__name__, "packed", ", ".join(serves(family))) for name, family in families()]
    if as_json:
        print(json.dumps([dict(zip(COLUMNS, row, strict=True)) for row in rows]))
        return 0
    table = [COLUMNS, *rows]
    widths = [max(len(row[column]) for row in table) for column in range(len(COLUMNS))]
    for row in table:
        print("  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip())
    print(NOTE)
    return 0
