"""Parameters of tests that only `make test-all` runs."""

from collections.abc import Iterable
from typing import Any

import pytest


def all_but(values: Iterable[Any], kept: Iterable[Any]) -> list[Any]:
    """Returns all values as parameters; values not in `kept` are marked as slow.

    A tuple is the values of several parameters.
    """
    kept = list(kept)
    return [
        value
        if value in kept
        else pytest.param(
            *(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.slow
        )
        for value in values
    ]
