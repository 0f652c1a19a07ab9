"""No value of an optimizer ever goes to another transform, field or parameter."""

import hypothesis
import jax
import numpy as np
import pytest
from flax import nnx
from hypothesis import strategies as st

import flaxckpt
from flaxckpt import transforms
from tests.helpers import optimizer_states as states
from tests.helpers import slow
from tests.helpers.optimizer_states import (
    LIKE_ADAM,
    TRANSFORMS,
    Layout,
    Optimizer,
    Part,
    Tags,
)

RENAMED = transforms.rename({r"(.*)/b": r"\1/c"})


def leaves(state):
    """The leaves of the optimizers, and of all else, by path."""
    if isinstance(state, tuple) and isinstance(state[-1], nnx.Optimizer):
        state = {"opt_state": state[1].opt_state}
    return {
        jax.tree_util.keystr(path): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(state)
    }


def check(found, fresh, wanted, tags, *, old_names=lambda param: param):
    """Asserts that each leaf is the wanted one or a fresh one, and counts the former.

    Args:
        found: What was restored.
        fresh: The state that it was restored into.
        wanted: That state with the number of each leaf.
        tags: The numbers.
        old_names: Path of a parameter -> its path in the checkpoint.
    """
    kept = 0
    others, numbers = leaves(fresh), leaves(wanted)
    for path, leaf in leaves(found).items():
        if np.array_equal(leaf, others[path]):
            continue
        origin, own = tags.origin(leaf), tags.origin(numbers[path])
        assert own is not None, f"{path}: {leaf}"
        assert origin == own._replace(param=old_names(own.param)), path
        kept += 1
    return kept


def check_change(writer, path, layout, old, new):
    """Asserts that no optimizer takes a value of another after a change of them."""
    tags = Tags()
    states.save_with(writer, path, layout.state(old, tags))
    fresh = layout.state(new)
    if (found := load(path, fresh)) is not None:
        check(found, fresh, layout.state(new, tags), tags)


def check_swap(path, layout, one, other):
    """Asserts that two optimizers that swap places take no value of each other."""
    old, new = {"g": one, "d": other}, {"g": other, "d": one}
    check_change("flaxckpt", path, layout, old, new)


def tagged_leaves(state, tags):
    """How many leaves of a state have numbers."""
    found = leaves(state).values()
    numbers = (leaf for leaf in found if np.size(leaf) and np.min(leaf) >= tags.FIRST)
    return sum(1 for _ in numbers)


def load(path, state, **options):
    """What is restored; None if that is refused."""
    try:
        return flaxckpt.load(path, state, unused="ignore", **options)
    except flaxckpt.errors.RestoreMismatchError:
        return None


@st.composite
def cases(draw, kinds=tuple(TRANSFORMS), layouts=states.layouts):
    """A layout, and its optimizers before and after a change."""
    layout = draw(layouts)
    old = {name: draw(states.optimizers(kinds)) for name in layout.names}
    new = {name: draw(states.changed(each, kinds)) for name, each in old.items()}
    if len(old) > 1 and draw(st.booleans()):
        swapped = dict(zip(new, reversed(new.values()), strict=True))
        # Else nobody can tell a transform from another of its kind in its place.
        if all(kinds_of(old[name]).isdisjoint(kinds_of(swapped[name])) for name in old):
            new = swapped
    return layout, old, new


def kinds_of(optimizer):
    return {part.kind for part in optimizer.parts} - {"clip"}


@hypothesis.settings(
    max_examples=45, suppress_health_check=list(hypothesis.HealthCheck)
)
@hypothesis.given(cases())
@pytest.mark.slow
def test_never_takes_values_from_another_transform(tmp_path_factory, case):
    check_change("flaxckpt", tmp_path_factory.mktemp("case") / "c", *case)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("kind", sorted(states.MAKERS))
@pytest.mark.parametrize("form", ["pair", "beside", "critic", "list"])
@pytest.mark.parametrize(
    ("old", "new"),
    [
        (["adam"], ["mine"]),
        (["adam", "adam"], ["mine", "mine"]),
        (["mine", "adam"], ["adam", "mine"]),
    ],
)
def test_custom_and_optax_states_never_mix_values(tmp_path, kind, form, old, new):
    # Nothing around the user's state says that it is the state of an optimizer.
    layout = Layout(kind, form, is_twin=False)
    old, new = (
        Optimizer(tuple(Part(k, f"{k}{n}") for n, k in enumerate(kinds)), "chain")
        for kinds in (old, new)
    )
    check_swap(tmp_path / "c", layout, old, new)


@pytest.mark.parametrize("wrappers", [("", "mask"), ("mask", ""), ("mask", "label")])
@pytest.mark.parametrize("wrapper", ["", "label", "mask"])
def test_matching_ignores_fully_masked_states(tmp_path, wrappers, wrapper):
    layout = Layout("dict", "train state", is_twin=False)
    parts = [Part("trace", f"trace{n}", each) for n, each in enumerate(wrappers)]
    same = {"g": Optimizer(tuple(parts), "chain", wrapper)}
    tags = Tags()
    saved = layout.state(same, tags)
    flaxckpt.save(tmp_path / "c", saved)
    fresh = layout.state(same)
    found = flaxckpt.load(tmp_path / "c", fresh)
    assert check(found, fresh, saved, tags) == tagged_leaves(saved, tags)


@pytest.mark.parametrize("form", ["tuple", "one key", "list", "states", "critic"])
def test_never_moves_counters_between_optimizers_without_moments(tmp_path, form):
    layout = Layout("dict", form, is_twin=False)
    schedules = Optimizer((Part("schedule", "one"), Part("schedule", "other")))
    clips = Optimizer((Part("clip", "one"), Part("clip", "other")))
    check_swap(tmp_path / "c", layout, schedules, clips)


@pytest.mark.parametrize("wrapper", ["", "mask", "label"])
@pytest.mark.parametrize(
    ("old", "new"), [((0, 1, 2), (1, 2)), ((1, 2), (0, 1, 2)), ((0, 1), (1,))]
)
def test_never_moves_counters_to_other_tuple_positions(tmp_path, wrapper, old, new):
    # Elements that are wrapped may be optimizers, too, and would keep their places.
    layout = Layout("dict", "train state")
    old, new = (
        {"g": Optimizer(tuple(Part("schedule", f"{n}", wrapper) for n in parts))}
        for parts in (old, new)
    )
    flaxckpt.save(tmp_path / "c", layout.state(old))
    with pytest.raises(flaxckpt.errors.RestoreMismatchError):
        flaxckpt.load(tmp_path / "c", layout.state(new), unused="ignore")


ADAM = Optimizer((Part("adam", "adam0"), Part("trace", "trace1"), Part("ema", "ema2")))
SCHEDULE = Optimizer((Part("schedule", "schedule1"),))
LION = Optimizer((Part("lion", "lion0"), Part("schedule", "schedule1")))


@pytest.mark.slow
@hypothesis.settings(
    max_examples=12, suppress_health_check=list(hypothesis.HealthCheck)
)
@hypothesis.given(cases(tuple(kind for kind in TRANSFORMS if kind not in LIKE_ADAM)))
@hypothesis.example(  # a lone counter beside a chain is an optimizer of its own
    (
        Layout("dict", "one key", is_twin=False),
        {"g": ADAM, "d": LION},
        {"g": SCHEDULE, "d": ADAM},
    )
)
def test_never_takes_orbax_values_from_another_transform(tmp_path_factory, case):
    check_change("orbax", tmp_path_factory.mktemp("case") / "c", *case)


@hypothesis.settings(
    max_examples=20, suppress_health_check=list(hypothesis.HealthCheck)
)
@hypothesis.given(states.layouts, st.data())
@pytest.mark.parametrize("writer", slow.all_but(["flaxckpt", "orbax"], ["flaxckpt"]))
def test_unchanged_optimizer_keeps_every_value(tmp_path_factory, writer, layout, data):
    same = {name: data.draw(states.optimizers()) for name in layout.names}
    tags = Tags()
    path = tmp_path_factory.mktemp("case") / "c"
    saved = layout.state(same, tags)
    states.save_with(writer, path, saved)
    fresh = layout.state(same)
    found = flaxckpt.load(path, fresh)
    assert check(found, fresh, saved, tags) == tagged_leaves(saved, tags)


@hypothesis.settings(
    max_examples=20, suppress_health_check=list(hypothesis.HealthCheck)
)
@hypothesis.given(
    st.sampled_from(sorted(states.MAKERS)),
    st.sampled_from(["train state", "bare", "average"]),
    st.lists(
        st.sampled_from(sorted(TRANSFORMS.keys() - {"clip"})),
        unique=True,
        min_size=1,
        max_size=3,
    ),
    st.sampled_from(["", "steps", "finite"]),
    st.booleans(),
)
@pytest.mark.slow
def test_renamed_parameters_keep_their_moments(
    tmp_path_factory, kind, form, kinds, wrapper, is_clipped
):
    layout = Layout(kind, form)
    hypothesis.assume(form != "bare" or "mine" not in kinds)  # only optax's are known
    parts = tuple(Part(kind, kind) for kind in kinds)
    old = {"g": Optimizer(parts)}
    clip = (Part("clip", "clip"),) * is_clipped
    new = {"g": Optimizer((*clip, *parts), wrapper=wrapper)}
    tags = Tags()
    path = tmp_path_factory.mktemp("case") / "c"
    saved = layout.state(old, tags)
    flaxckpt.save(path, saved)
    fresh = layout.state(new, renamed=True)
    found = flaxckpt.load(path, fresh, transforms=[RENAMED])
    wanted = layout.state(new, tags, renamed=True)
    kept = check(
        *(found, fresh, wanted, tags),
        old_names=lambda p: p.removesuffix("/c") + "/b" * p.endswith("/c"),
    )
    assert kept == tagged_leaves(saved, tags)
