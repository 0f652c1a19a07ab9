"""Sizes and conditions that tables of maps ask of a configuration."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flaxckpt import errors
from flaxckpt._maps import model_config

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


@pytest.mark.parametrize(
    ("rule", "size"),
    [
        (7, 7),
        ("layers", 20),
        ("head_dim|width/heads", 4),
        ("absent|layers", 20),
        ("absent", None),
        ("layers//6", 3),
        ("layers%6", 2),
        ("layers//6*6", 18),
        ("layers%4", 0),
        ("absent|head_dim|12", 12),
    ],
)
def test_derives_sizes_from_keys(rule, size):
    assert model_config.find_size(CONFIG, rule) == size


@given(st.integers(1, 500), st.integers(1, 20))
def test_blocks_and_remainder_cover_all_layers(layers, block):
    config = {"layers": layers}
    sizes = [
        model_config.find_size(config, f"layers{rule}")
        for rule in (f"//{block}*{block}", f"%{block}")
    ]
    assert sum(sizes) == layers
    assert sizes[0] % block == 0


@pytest.mark.parametrize(
    ("config", "rule", "message"),
    [
        ({"layers": 7}, "layers/2", "layers 7 of the config is not divisible by 2"),
        (CONFIG, "layers/heads", "not divisible by heads 6"),
        ({"layers": 0}, "layers", "must be a positive integer, got 0"),
        ({"layers": True}, "layers", "must be a positive integer, got True"),
        ({"layers": "3"}, "layers//2", "must be a positive integer, got '3'"),
    ],
)
def test_rejects_wrong_sizes(config, rule, message):
    with pytest.raises(errors.OptionError, match=message):
        model_config.find_size(config, rule)


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
def test_evaluates_conditions(condition, is_true):
    assert model_config.holds(CONFIG, condition) == is_true
