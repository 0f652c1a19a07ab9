"""Sizes and conditions that tables of maps ask of a configuration."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import flaxckpt
from flaxckpt import errors, maps

CONFIG = {
    "layers": 20,
    "width": 24,
    "heads": 6,
    "kv_heads": 6,
    "head_dim": None,
    "tied": False,
    "kind": "gated-gelu",
    "rope": {"type": "llama3"},
    "other_rope": None,
    "architectures": ["T5EncoderModel"],
}


def toy(config, rows, **sizes):
    """Returns the map of a family of these tensors."""
    return maps.Family("toy", (), "", sizes, {"x": rows})(config, target="x")


def load(directory, count, changes):
    """Loads a checkpoint of leaves `k/0`, `k/1`, …, and one named `one`."""
    leaves = {str(n): np.zeros(1) for n in range(count)}
    flaxckpt.save(directory / "c", {"k": leaves, "one": 1}, overwrite=True)
    return flaxckpt.load(directory / "c", transforms=changes)


ONE = maps.Tensor("one", "one")


@pytest.mark.parametrize(
    ("rule", "size"),
    [
        (7, 7),
        ("layers", 20),
        ("head_dim|width/heads", 4),
        ("absent|layers", 20),
        ("layers//6", 3),
        ("layers%6", 2),
        ("layers//6*6", 18),
        ("layers%4", 0),
        ("absent|head_dim|12", 12),
    ],
)
def test_derives_sizes_from_keys(tmp_path, rule, size):
    changes = toy(CONFIG, [ONE, maps.Tensor("k.{i}", "l/{i}")], i=rule)
    assert len(load(tmp_path, size, changes).get("l", {})) == size
    with pytest.raises(errors.OptionError):
        load(tmp_path, size + 1, changes)


@settings(max_examples=20)
@given(st.integers(1, 50), st.integers(1, 20))
def test_blocks_and_remainder_cover_all_layers(tmp_path_factory, layers, block):
    blocks = f"layers//{block}*{block}"
    changes = toy(
        {"layers": layers},
        [ONE, maps.Tensor("k.{i}", "l/{i}"), maps.Tensor("k.{j+first}", "m/{j}")],
        **{"i": blocks, "first": blocks, "j": f"layers%{block}"},
    )
    found = load(tmp_path_factory.mktemp("layers"), layers, changes)
    assert len(found.get("l", {})) == layers - layers % block
    assert len(found.get("m", {})) == layers % block


@pytest.mark.parametrize(
    ("config", "rule", "message"),
    [
        ({"layers": 7}, "layers/2", "layers 7 of the config is not divisible by 2"),
        (CONFIG, "layers/heads", "not divisible by heads 6"),
        ({"layers": 0}, "layers", "must be a positive integer, got 0"),
        (CONFIG, "absent", "the config lacks absent"),
        ({"layers": True}, "layers", "must be a positive integer, got True"),
        ({"layers": "3"}, "layers//2", "must be a positive integer, got '3'"),
    ],
)
def test_rejects_wrong_sizes(config, rule, message):
    with pytest.raises(errors.OptionError, match=message):
        toy(config, [maps.Tensor("k.{i}", "l/{i}")], i=rule)


@pytest.mark.parametrize(
    ("condition", "is_true"),
    [
        ("", True),
        ("layers", True),
        ("tied", False),
        ("not tied", True),
        ("not absent", True),
        ("kind=gated-*", True),
        ("not kind=gated-*", False),
        ("rope.type=llama3", True),
        ("kind.type", False),
        ("architectures=*EncoderModel*", True),
        ("not architectures=*AudioClassification*", True),
        ("other_rope.type=llama3", False),
        ("heads==kv_heads", True),
        ("not heads==kv_heads", False),
        ("heads==layers", False),
        ("not tied and heads==kv_heads", True),
        ("not tied and heads==layers", False),
    ],
)
def test_evaluates_conditions(tmp_path, condition, is_true):
    changes = toy(CONFIG, [ONE, maps.Tensor("k.0", "zero", when=condition)])
    assert ("zero" in load(tmp_path, int(is_true), changes)) is is_true
