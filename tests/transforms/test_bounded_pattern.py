"""Patterns from files against `re`, and patterns on which `re` hangs."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flaxckpt._transforms import bounded_pattern

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


@given(parts, st.text("ab.\n", max_size=6))
def test_matcher_agrees_with_re(pattern, text):
    found = bool(re.match(pattern, text))
    assert bounded_pattern.Matcher().matches(pattern, text) == found


@pytest.mark.parametrize(
    ("pattern", "text", "found"),
    [
        (
            r".*decoder.*(SelfAttention|EncDecAttention).*(q|v)$",
            "decoder.0.Self",
            False,
        ),
        (
            r".*decoder.*(SelfAttention|EncDecAttention).*(q|v)$",
            "decoder.block.0.layer.1.EncDecAttention.q",
            True,
        ),
        (r"^(?!.*(visual|lm_head)).*(q_proj|k_proj).*", "layers.0.q_proj", True),
        (r"^(?!.*(visual|lm_head)).*(q_proj|k_proj).*", "visual.0.q_proj", False),
        (r"(a+)+b", "a" * 500, False),
        (r"(a|a)*b|((a*)*)*c", "a" * 200, False),
    ],
)
def test_matches_patterns_of_adapters(pattern, text, found):
    assert bounded_pattern.Matcher().matches(pattern, text) is found


@pytest.mark.parametrize(
    ("pattern", "why"),
    [
        ("a" * 2000, "more than 1000 characters"),
        ("(a", "not a valid regular expression"),
        ("a{101}", "more than 100 times"),
        (r"(a)\1", "not known here"),
        ("(?<=a)b", "not known here"),
        ("(?i)b", "not known here"),
        ("(" * 30 + ")" * 30, "nested"),
    ],
)
def test_rejects_other_patterns(pattern, why):
    with pytest.raises(ValueError, match=why):
        bounded_pattern.Matcher().matches(pattern, "a" * 200)


def test_patterns_of_file_share_step_limit():
    matcher = bounded_pattern.Matcher()
    with pytest.raises(ValueError, match="steps"):
        [matcher.matches("(.*.*.*.*){20}x", "a" * 300) for _ in range(100)]


ends = st.lists(st.sampled_from(["a", "b", ".", r"\.", "a*"]), max_size=4)


@given(ends.map("".join), st.text("ab.", max_size=6))
def test_matches_end_of_name_like_peft(pattern, name):
    found = bool(re.match(rf"(.*\.)?({pattern})$", name))
    assert bounded_pattern.Matcher().matches_end(pattern, name) == found
