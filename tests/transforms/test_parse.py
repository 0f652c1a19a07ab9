"""Transforms from texts: their order, and texts that are refused."""

import numpy as np
import pytest

import flaxckpt
from tests.helpers import command_line


def convert(directory, *texts, code=0):
    """Converts a checkpoint with options as `--only`, and returns what is printed."""
    state = {
        "params": {"dense": {"kernel": np.ones((2, 3), np.float32)}, "old": {"w": 1}},
        "step": 3,
        "rest": np.zeros(2),
    }
    flaxckpt.save(directory / "a", state)
    given = ["convert", directory / "a", directory / "b", *texts]
    return command_line.run(*given, code=code)


def test_parses_texts_into_transforms_in_order(tmp_path):
    convert(
        tmp_path,
        "--cast=dense/weight=bfloat16",
        r"--rename=params/(.*)=\1",
        "--rename=dense/kernel=dense/weight",
        "--rename=step=count",
        "--drop=params/old/.*",
        "--only=params/.*",
        "--only=step",
    )
    found = flaxckpt.load(tmp_path / "b")
    assert (found.keys(), found["count"]) == ({"dense", "count"}, 3)
    assert found["dense"]["weight"].dtype.name == "bfloat16"
    described = [
        line.partition("(")[0]
        for line in command_line.read_json("show", tmp_path / "b")["transforms"]
    ]
    assert described == ["keep", "drop", "rename", "rename", "rename", "cast"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("--rename=params", "rename must be PATTERN=NAME, found 'params'"),
        ("--rename==b", "rename must be PATTERN=NAME, found '=b'"),
        ("--cast=.*", "cast must be PATTERN=DTYPE, found '.*'"),
        ("--cast=.*=floaty", "floaty"),
        ("--only=(", "regular expression"),
    ],
)
def test_rejects_invalid_texts(tmp_path, text, message):
    assert message in convert(tmp_path, text, code=2)
