"""A strategy for all registered preservation policies."""

from hypothesis import strategies as st

from flaxckpt import _policy_forms
from flaxckpt.policies import PreservationPolicy


def any_policy(
    **values: st.SearchStrategy[object],
) -> st.SearchStrategy[PreservationPolicy]:
    """Returns a strategy for the policies of flaxckpt.

    Args:
        values: Name of a policy's field -> its values; those of `mode` are known.
    """
    values |= {"mode": st.sampled_from(["min", "max"])}
    return st.one_of(
        st.builds(form.cls, **{name: values[name] for name in form.fields})
        for form in _policy_forms.FORMS.values()
    )
