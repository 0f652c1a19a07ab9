"""Several releases of Orbax and flaxckpt read each other's checkpoints."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from verification.orbax_versions import __main__ as runner
from verification.orbax_versions import states, table

W = np.arange(4, dtype=np.float32)


@pytest.mark.slow
def test_page_matches_results_of_all_orbax_releases(tmp_path):
    missing = [r for r in runner.releases() if not runner.interpreter(r).exists()]
    if missing:
        pytest.skip(f"no environment with Orbax {missing}: make test-orbax-versions")
    results = runner.run(tmp_path)
    assert not table.find_wrong(results)
    page = runner.PAGE.read_text(encoding="utf-8")
    generated = table.render(runner.read_requirements(), results)
    assert page == table.replace(page, generated), "run it with --write"


# ---- the comparison --------------------------------------------------------------


@pytest.mark.parametrize("name", states.STATES)
def test_compare_finds_copy_of_state_equal(name):
    state = states.STATES[name]()
    copy = jax.tree.map(lambda leaf: leaf, state)
    assert states.compare(copy, state, has_target=True) == states.EQUAL


@pytest.mark.parametrize(
    ("read", "saved"),
    [
        ({"w": W}, {"w": W + 1}),
        ({"w": W}, {"w": W.astype(jnp.bfloat16)}),
        ({"w": W}, {"w": W.reshape(2, 2)}),
        ({"w": W}, {"w": W, "b": W}),
        ({"w": np.float32(0)}, {"w": np.asarray(-0.0, np.float32)}),
        ({"w": []}, {"w": {}}),
        ({"w": None}, {"w": W}),
        ({"w": 1}, {"w": 2}),
        ({"w": "a"}, {"w": "b"}),
    ],
)
def test_compare_reports_different_leaves_as_wrong(read, saved):
    assert states.compare(read, saved).startswith("wrong")


def test_different_containers_are_wrong_only_with_target():
    assert states.compare([W], (W,)) == states.EQUAL
    assert states.compare([W], (W,), has_target=True).startswith("wrong")


def test_none_matches_empty_tuple_only_without_target():
    saved = {"w": W, "empty": optax.EmptyState()}
    read = {"w": W, "empty": None}
    assert states.compare(read, saved) == states.EQUAL
    assert states.compare(read, saved, has_target=True).startswith("wrong")


def test_compare_distinguishes_key_data_from_key():
    key = jax.random.key(1)
    data = jax.random.key_data(key)
    assert states.compare([data], [key]) == states.KEY_DATA
    assert states.compare([data + 1], [key]).startswith("wrong")
    assert states.compare([jax.random.key(2)], [key]).startswith("wrong")


# ---- the tables ------------------------------------------------------------------

ALL = {"StandardRestore": "equal", "StandardRestore, target": "equal"}
NOT_WITHOUT = ALL | {"StandardRestore": "refused: ValueError"}
NONE = dict.fromkeys(ALL, "refused: ValueError")


@pytest.mark.parametrize(
    ("read", "own", "cell"),
    [
        (ALL, ALL, table.YES),
        (ALL, NONE, table.YES),
        (NOT_WITHOUT, ALL, table.WITH_STATE),
        (NOT_WITHOUT, NOT_WITHOUT, table.LIKE_OWN),
        (NONE, ALL, table.NO),
        (ALL | {"StandardRestore, target": "refused: E"}, ALL, table.SOME),
        (ALL | {"StandardRestore": states.KEY_DATA}, ALL, table.KEY_DATA),
        (NONE | {"StandardRestore": "wrong: w"}, ALL, table.WRONG),
    ],
)
def test_cell_combines_all_layouts_and_readers(read, own, cell):
    found = {"reads": {"raw": {"s": ALL}, "compact": {"s": read}, "zstd": {}}}
    found["reads own"] = {"s": own}
    if read is NONE:
        found["reads"]["raw"]["s"] = NONE
    assert table.state_cell(found, "s") == cell


def test_find_wrong_reports_wrong_values_and_flaxckpt_refusals():
    results = {
        "0.1": {
            "reads": {"raw": {"s": ALL | {"v1.load": "wrong: w"}}},
            "reads own": {"s": {"v1.load": "refused: E"}},
            "flaxckpt reads": {"v1.save": {"s": "refused: E"}},
        }
    }
    assert table.find_wrong(results) == [
        "0.1: reads | raw | s | v1.load: wrong: w",
        "0.1: flaxckpt reads | v1.save | s: refused: E",
    ]


def test_replace_rejects_page_without_generated_part():
    page = f"before\n{table.BEGIN}\nold\n{table.END}\nafter"
    assert table.replace(page, r"a \1") == "before\na \\1\nafter"
    with pytest.raises(ValueError, match="found 0"):
        table.replace("before", "new")
