"""Parameters of tests that are left to `make test-all`."""

from collections.abc import Iterable
from typing import Any

import pytest


def all_but(values: Iterable[Any], kept: Iterable[Any]) -> list[Any]:
    """All the values as parameters, of which those that are not kept are slow."""
    kept = list(kept)
    return [
        value if value in kept else pytest.param(value, marks=pytest.mark.slow)
        for value in values
    ]
