"""Stacks of some of the layers: blocks of several layers, and experts."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st

import flaxckpt
from flaxckpt import errors
from flaxckpt.transforms import stack, unstack
from tests.transforms.states import round_trip, state_of, table_of, transformed


def layers(count):
    return {f"l_{i}": jnp.ones((2, 3)) for i in range(count)}


PATTERN = r"params/l_(\d+)"


@pytest.mark.parametrize("kind", ["dict", "FrozenDict", "nnx"])
def test_stacks_and_unstacks_even_and_odd_layers(tmp_path, kind):
    state = state_of(kind, {**layers(6), "b": jnp.ones(3)}, optax.adamw(1e-3))
    changes = [
        stack(PATTERN, "params/even", stride=2),
        stack(PATTERN, "params/odd", start=1, stride=2),
    ]
    before, after = table_of(state), transformed(changes, state)
    for path, value in before.items():
        if "l_" in path:
            number = int(path.partition("l_")[2][0])
            whole = path.replace(f"l_{number}", "odd" if number % 2 else "even")
            np.testing.assert_array_equal(value, after[whole][number // 2])
    back = round_trip(changes, state)
    assert back.keys() == before.keys()
    for path, value in before.items():
        np.testing.assert_array_equal(value, back[path], err_msg=path)
    flaxckpt.save(tmp_path / "c", state, transforms=changes)
    undone = [change.inverse() for change in reversed(changes)]
    found = flaxckpt.load(tmp_path / "c", state, transforms=undone)
    for path, value in table_of(found).items():
        np.testing.assert_array_equal(before[path], value, err_msg=path)


@pytest.mark.slow
@given(
    count=st.integers(1, 9),
    start=st.integers(0, 4),
    stride=st.integers(1, 4),
    size=st.integers(1, 4),
    is_bounded=st.booleans(),
)
def test_inverse_undoes_stack_of_any_numbers(count, start, stride, size, is_bounded):
    state = {"params": {k: np.full(2, i) for i, k in enumerate(layers(count))}}
    stop = start + size if is_bounded else None
    change = stack(PATTERN, "params/s", start=start, stride=stride, stop=stop)
    numbers = range(start, count if stop is None else stop, stride)
    if not numbers or (numbers and numbers[-1] >= count):
        with pytest.raises(errors.OptionError, match=r"lacks part|no part has"):
            transformed([change], state)
        return
    found = transformed([change], state)
    assert found["params/s"].tolist() == [[i, i] for i in numbers]
    left = {f"params/l_{i}" for i in range(count) if i not in numbers}
    assert found.keys() == {"params/s", *left}
    back = round_trip([change], state)
    assert {k: v.tolist() for k, v in back.items()} == {
        k: v.tolist() for k, v in table_of(state).items()
    }


def test_error_names_missing_part_between_two():
    state = {f"l_{i}": np.ones(2) for i in (0, 2, 6)}
    with pytest.raises(errors.OptionError, match="lacks part 4; found l_0, l_2"):
        transformed([stack(r"l_(\d)", "l", stride=2)], state)


def test_unstack_rejects_unequal_rows_and_numbers():
    state = {"l": np.ones((4, 2))}
    with pytest.raises(errors.OptionError, match="4 rows, but there are 3 numbers"):
        transformed([unstack("l", "l_{i}", start=1, stride=2, stop=7)], state)
    found = transformed([unstack("l", "l_{i}", start=1, stride=2, stop=8)], state)
    assert list(found) == ["l_1", "l_3", "l_5", "l_7"]


@pytest.mark.parametrize("kind", ["dict", "FrozenDict", "nnx"])
def test_stacks_experts_in_each_layer_and_then_layers(kind):
    params = {
        f"{layer}.experts.{expert}.w{n}": jnp.ones((2, 3))
        for layer in range(2)
        for expert in range(3)
        for n in (1, 2)
    }
    state = state_of(kind, params, optax.adamw(1e-3))
    changes = [
        stack(
            r"params/(\d+)\.experts\.(?P<i>\d+)\.(w\d)", r"params/\1.experts.\3", axis=0
        ),
        stack(r"params/(?P<i>\d+)\.experts\.(w\d)", r"params/experts.\2", axis=1),
    ]
    before, after = table_of(state), transformed(changes, state)
    assert after["params/experts.w1"].shape == (3, 2, 2, 3)
    for path, value in before.items():
        if path.startswith("params/"):
            layer, _, expert, name = path.removeprefix("params/").split(".")
            whole = after[f"params/experts.{name}"]
            np.testing.assert_array_equal(value, whole[int(expert), int(layer)])
    back = round_trip(changes, state)
    for path, value in before.items():
        np.testing.assert_array_equal(value, back[path], err_msg=path)
