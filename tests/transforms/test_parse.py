"""Transforms from texts: their order, and texts that are refused."""

import numpy as np
import pytest

import flaxckpt
from flaxckpt import errors
from flaxckpt._transforms import from_text
from flaxckpt._transforms.base import describe


def test_texts_become_transforms_in_order():
    found = from_text.parse(
        only=["params/.*", "step"],
        drop=["params/old/.*"],
        rename=[r"params/(.*)=\1", "step=count"],
        cast=[".*/kernel=bfloat16"],
    )
    assert [line.partition("(")[0] for line in describe(found)] == [
        *("keep", "drop", "rename", "rename", "cast")
    ]
    assert from_text.parse() == []


def test_they_change_a_checkpoint(tmp_path):
    state = {
        "params": {"dense": {"kernel": np.ones((2, 3), np.float32)}},
        "step": 3,
        "rest": np.zeros(2),
    }
    flaxckpt.save(tmp_path / "a", state)
    changes = from_text.parse(
        only=["params/.*", "step"], rename=[r"params/(.*)=\1"], cast=[".*el=bfloat16"]
    )
    found = flaxckpt.load(tmp_path / "a", transforms=changes)
    assert found["step"] == 3
    assert found.keys() == {"dense", "step"}
    assert found["dense"]["kernel"].dtype.name == "bfloat16"


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({"rename": ["params"]}, "rename must be PATTERN=NAME, found 'params'"),
        ({"rename": ["=b"]}, "rename must be PATTERN=NAME, found '=b'"),
        ({"cast": [".*"]}, r"cast must be PATTERN=DTYPE, found '\.\*'"),
        ({"cast": [".*=floaty"]}, "floaty"),
        ({"only": ["("]}, "regular expression"),
    ],
)
def test_wrong_texts_are_refused(rules, message):
    with pytest.raises(errors.OptionError, match=message):
        from_text.parse(**rules)
