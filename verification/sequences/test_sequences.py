"""Sequences of operations lose nothing in a power cut."""

import itertools
import random

import pytest

from verification.sequences import operations
from verification.sequences.explore import explore

SHORT = [(name,) for name in operations.OPERATIONS]
PAIRS = [*itertools.product(operations.OPERATIONS, repeat=2)]
TRIPLES = [*itertools.product(operations.OPERATIONS, repeat=3)]

FOUND = [
    ("overwrite", "delete"),  # came back as it was before it was overwritten
    ("add_metrics", "upload", "overwrite", "save", "upload"),  # the same
    ("delete", "pin", "overwrite"),  # lost the pin of the step that was uploaded
]


@pytest.mark.slow
def test_power_cut_in_operation_loses_nothing(directory, library):
    result = explore([*SHORT, *FOUND], directory, library)
    assert not result.problems, "\n".join(result.problems)
    assert result.sequences == len(SHORT) + len(FOUND)
    assert result.cuts > 100
    assert result.checked > 50


@pytest.mark.slow
def test_power_cut_in_sequence_loses_nothing(directory, library):
    draw = random.Random(0)
    sample = [*draw.sample(PAIRS, 20), *draw.sample(TRIPLES, 30)]
    result = explore(sample, directory, library, workers=2)
    assert not result.problems, "\n".join(result.problems)


@pytest.mark.slow
def test_detects_save_without_syncs(directory, library):
    result = explore([("save_carelessly",)], directory, library)
    assert any("is gone" in problem for problem in result.problems)
    assert any("cannot be read" in problem for problem in result.problems)


def test_generates_all_sequences_of_up_to_three_operations():
    assert len([*operations.all_sequences(3)]) == 9 + 81 + 729
