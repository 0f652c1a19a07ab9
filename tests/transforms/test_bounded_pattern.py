"""Patterns of adapters against `re`, and patterns on which `re` hangs."""

import json
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import flaxckpt
from flaxckpt import errors
from flaxckpt.transforms import merge_lora

SHORT = ("a", "b", "ab", "aab", "a.b", "b.a", "b.aa", "b.a.b", "a_1.b")
LONG = (
    "decoder.0.Self",
    "decoder.block.0.layer.1.EncDecAttention.q",
    "layers.0.q_proj",
    "visual.0.q_proj",
    "a" * 500,
)


@pytest.fixture(scope="module", params=[SHORT, LONG], ids=["short", "long"])
def model(request, tmp_path_factory):
    """A directory with a model and its adapter, and the names of the modules."""
    root = tmp_path_factory.mktemp("model")
    one = np.ones((1, 1), np.float32)
    base, adapter = {}, {}
    for name in request.param:
        base[f"{name}.weight"] = 0 * one
        for part in "AB":
            adapter[f"base_model.model.{name}.lora_{part}.weight"] = one
    for name, leaves in (("base", base), ("adapter/adapter_model", adapter)):
        nested = {}
        for path, leaf in leaves.items():
            *above, last = path.split(".")
            inner = nested
            for key in above:
                inner = inner.setdefault(key, {})
            inner[last] = leaf
        flaxckpt.save(root / "leaves" / name, nested)
        (root / name).parent.mkdir(exist_ok=True)
        flaxckpt.convert(root / "leaves" / name, root / f"{name}.safetensors")
    return root, request.param


def matched(model, *patterns):
    """Returns the modules that patterns of an adapter name."""
    root, modules = model
    alphas = dict.fromkeys(patterns, 7)
    config = {"peft_type": "LORA", "r": 1, "lora_alpha": 4, "alpha_pattern": alphas}
    (root / "adapter/adapter_config.json").write_text(json.dumps(config))
    found = flaxckpt.load(
        root / "base.safetensors", transforms=[merge_lora(root / "adapter")]
    )
    weights = {}
    for name in modules:
        inner = found
        for key in name.split("."):
            inner = inner[key]
        weights[name] = inner["weight"].item()
    assert {*weights.values()} <= {4, 7}
    return {name for name, weight in weights.items() if weight == 7}


parts = st.recursive(
    st.sampled_from(["a", "b", ".", "[ab]", "[^a]", r"\w", r"\.", "^", "$", ""]),
    lambda inner: st.one_of(
        st.builds("{}{}".format, inner, inner),
        st.builds("({}|{})".format, inner, inner),
        st.builds("(?={})".format, inner),
        st.builds("(?!{})".format, inner),
        st.builds(
            "(?:{}){}".format,
            inner,
            st.sampled_from(["*", "+", "?", "*?", "{2}", "{1,}", "{1,2}"]),
        ),
    ),
    max_leaves=6,
)
ends = st.lists(st.sampled_from(["a", "b", ".", r"\.", "a*"]), max_size=4)


@pytest.mark.parametrize("model", [SHORT], indirect=True, ids=["short"])
@settings(max_examples=60)
@given(pattern=parts | ends.map("".join))
def test_matches_end_of_name_like_peft(model, pattern):
    wanted = {name for name in SHORT if re.match(rf"(.*\.)?({pattern})$", name)}
    assert matched(model, pattern) == wanted


@pytest.mark.parametrize("model", [LONG], indirect=True, ids=["long"])
@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        (r".*decoder.*(SelfAttention|EncDecAttention).*(q|v)$", {LONG[1]}),
        (r"^(?!.*(visual|lm_head)).*(q_proj|k_proj).*", {"layers.0.q_proj"}),
        (r"(a+)+b", set()),
        (r"(a|a)*b|((a*)*)*c", set()),
    ],
)
def test_matches_patterns_of_adapters(model, pattern, names):
    assert matched(model, pattern) == names


@pytest.mark.parametrize("model", [LONG], indirect=True, ids=["long"])
@pytest.mark.parametrize(
    ("pattern", "why"),
    [
        ("a" * 2000 + "*", "more than 1000 characters"),
        ("(a", "not a valid regular expression"),
        ("a{101}", "more than 100 times"),
        (r"(a)\1", "not known here"),
        ("(?<=a)b", "not known here"),
        ("(?i)b", "not a valid regular expression"),
        ("(" * 30 + ")" * 30, "nested"),
    ],
)
def test_rejects_other_patterns(model, pattern, why):
    with pytest.raises(errors.OptionError, match=why):
        matched(model, pattern)


@pytest.mark.parametrize("model", [LONG], indirect=True, ids=["long"])
def test_patterns_of_file_share_step_limit(model):
    with pytest.raises(errors.OptionError, match="steps"):
        matched(model, *(f"(.*.*.*.*){{20}}x{n}" for n in range(100)))
