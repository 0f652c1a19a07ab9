"""All preservation policies, as a strategy and as the guide shows them."""

import dataclasses
import re

from hypothesis import strategies as st

from flaxckpt import policies
from tests import ROOT

CLASSES = [
    found
    for found in vars(policies).values()
    if hasattr(found, "preserved") and not getattr(found, "_is_protocol", False)
]


def any_policy(
    **values: st.SearchStrategy[object],
) -> st.SearchStrategy[policies.PreservationPolicy]:
    """Returns a strategy for the policies of flaxckpt.

    Args:
        values: Name of a policy's field -> its values; those of `mode` are known.
    """
    values |= {"mode": st.sampled_from(["min", "max"])}
    return st.one_of(
        st.builds(cls, **{field.name: values[field.name] for field in fields})
        for cls in CLASSES
        if (fields := dataclasses.fields(cls))
    )


def in_guide() -> list[tuple[str, str, str]]:
    """Returns the rows of the guide: name of a policy, as an option, in a file."""
    guide = (ROOT / "docs/retention.md").read_text("utf-8")
    return re.findall(r"^\| `(\w+)\(.*?\)` \| `(.+?)` \| `(\{.+?\})` \|", guide, re.M)
