"""Leaves remapped by a table of names and forms."""

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from flax.core import FrozenDict
from hypothesis import given, settings
from hypothesis import strategies as st

import flaxckpt
from flaxckpt import errors
from flaxckpt.transforms import Row, inverse, remap, rename

LAYERS, EXPERTS = 4, 2
SIZES = {"h": 4, "r": 2}


def params():
    rng = np.random.default_rng(0)

    def normal(*shape):
        return rng.normal(size=shape).astype(np.float32)

    layer = lambda: {  # noqa: E731
        "q": {"weight": normal(8, 6)},
        "up": {"weight": normal(10, 6)},
        "experts": {str(e): {"w": normal(3, 5)} for e in range(EXPERTS)},
    }
    return {
        "embed": {"weight": normal(11, 6)},
        "layers": {str(i): layer() for i in range(LAYERS)},
        "qkv": {"weight": normal(24, 6)},
    }


def rows(source="", target=""):
    listed = [
        ("embed/weight", "embed/embedding"),
        ("layers/{i}/q/weight", "layers_{i}/q/kernel", "(h d) e -> e h d"),
        ("layers/{(b r)}/up/weight", "blocks/layer_{r}/up", "b f e -> e b f"),
        ("layers/{i}/experts/{x}/w", "experts/w", "x i f e -> i x e f"),
        ("qkv/weight", "attention/{c:q|k|v}/kernel", "(c o) e -> c e o"),
    ]
    return [(source + old, target + new, *form) for old, new, *form in listed]


def expected(old):
    layers = [old["layers"][str(i)] for i in range(LAYERS)]
    up = np.stack([layer["up"]["weight"] for layer in layers]).transpose(2, 0, 1)
    q, k, v = np.split(old["qkv"]["weight"], 3)
    return {
        "embed": {"embedding": old["embed"]["weight"]},
        **{
            f"layers_{i}": {"q": {"kernel": layer["q"]["weight"].T.reshape(6, 4, 2)}}
            for i, layer in enumerate(layers)
        },
        "blocks": {f"layer_{r}": {"up": up[:, r::2]} for r in range(2)},
        "experts": {
            "w": np.stack(
                [
                    [layer["experts"][str(x)]["w"].T for x in range(EXPERTS)]
                    for layer in layers
                ]
            )
        },
        "attention": {
            c: {"kernel": m.T} for c, m in zip("qkv", (q, k, v), strict=True)
        },
    }


def assert_equal(wanted, found):
    assert jax.tree.structure(wanted) == jax.tree.structure(found)
    jax.tree.map(np.testing.assert_array_equal, wanted, found)


def test_rows_rename_reshape_stack_and_split(tmp_path):
    old = params()
    flaxckpt.save(tmp_path / "old", old)
    new = flaxckpt.load(tmp_path / "old", transforms=[remap(rows(), **SIZES)])
    assert_equal(expected(old), new)


def test_plan_knows_shapes_before_reading(tmp_path):
    flaxckpt.save(tmp_path / "old", params())
    wanted = jax.eval_shape(lambda: expected(params()))
    plan = flaxckpt.plan(tmp_path / "old", wanted, transforms=[remap(rows(), **SIZES)])
    assert not plan.problems
    assert plan.count("transformed") == 10


@pytest.mark.slow
@pytest.mark.parametrize("container", [dict, FrozenDict])
def test_moments_follow_remap_and_its_inverse(tmp_path, container):
    old = params()
    tx = optax.adamw(1e-3)

    def state_of(p):
        p = container(p)
        moments = jax.tree.map(lambda x: x + 1, tx.init(p))
        return {"params": p, "opt_state": moments}

    state = state_of(old)
    changes = [remap(rows("params/", "params/"), **SIZES)]
    flaxckpt.save(tmp_path / "new", state, transforms=changes)
    new = flaxckpt.load(tmp_path / "new", state_of(expected(old)))
    assert_equal(state_of(expected(old))["params"], new["params"])
    assert float(new["opt_state"][0].mu["experts"]["w"][0, 0, 0, 0]) == 1
    back = flaxckpt.load(tmp_path / "new", state, transforms=inverse(changes))
    assert_equal(state, back)


def test_moments_follow_parameters_out_of_their_container(tmp_path):
    params = {
        "model": {"embed": {"weight": np.full((4, 3), 1.0)}},
        "lm_head": {"weight": np.full((4, 3), 2.0)},
    }
    adam = optax.adam(1e-3).init(params)
    state = {"params": params, "opt_state": (adam[0]._replace(mu=params), adam[1])}
    flaxckpt.save(tmp_path / "old", state)
    changes = [
        rename("params/(.*)", r"\1"),
        remap(
            [
                ("model/embed/weight", "net/model/embed/embedding"),
                ("lm_head/weight", "net/lm_head/kernel", "v e -> e v"),
            ]
        ),
    ]
    new = flaxckpt.load(tmp_path / "old", transforms=changes)
    mu = new["opt_state"][0].mu
    assert_equal(new["net"], mu.get("net", mu))


def test_run_restores_its_own_remapped_steps(tmp_path):
    old = params()
    with flaxckpt.Checkpointer(
        tmp_path / "run", transforms=[remap(rows(), **SIZES)]
    ) as checkpointer:
        checkpointer.save(1, old)
        assert_equal(old, checkpointer.restore(old))


def test_fills_nnx_model(tmp_path):
    class Block(nnx.Module):
        def __init__(self, rngs):
            self.q = nnx.Linear(6, 8, use_bias=False, rngs=rngs)

    class Model(nnx.Module):
        def __init__(self, rngs):
            self.blocks = nnx.List([Block(rngs) for _ in range(LAYERS)])

    old = params()
    flaxckpt.save(tmp_path / "old", old)
    model = Model(nnx.Rngs(0))
    changes = [remap([("layers/{i}/q/weight", "blocks/{i}/q/kernel", "o e -> e o")])]
    model = flaxckpt.load(tmp_path / "old", model, transforms=changes)
    for i, block in enumerate(model.blocks):
        wanted = old["layers"][str(i)]["q"]["weight"].T
        np.testing.assert_array_equal(block.q.kernel.get_value(), wanted)


def there_and_back(tmp_path, old, changes):
    """Returns what the changes make of a state; asserts that the inverse undoes it."""
    flaxckpt.save(tmp_path / "old", old)
    new = flaxckpt.load(tmp_path / "old", transforms=changes)
    flaxckpt.save(tmp_path / "new", new)
    assert_equal(old, flaxckpt.load(tmp_path / "new", transforms=inverse(changes)))
    return new


def test_offset_and_known_sizes_cover_remaining_layers(tmp_path):
    old = {"layers": {str(i): np.full(2, i, np.int32) for i in range(7)}}
    changes = [
        remap(
            [("layers/{(b r)}", "blocks/layer_{r}"), ("layers/{t+6}", "rest_{t}")],
            b=2,
            r=3,
        )
    ]
    new = there_and_back(tmp_path, old, changes)
    assert [list(new["blocks"][f"layer_{r}"][:, 0]) for r in range(3)] == [
        [0, 3],
        [1, 4],
        [2, 5],
    ]
    assert list(new["rest_0"]) == [6, 6]


def test_inverse_rejects_unequal_copies(tmp_path):
    old = {"embed": np.arange(6.0).reshape(2, 3)}
    changes = [remap([("embed", "embedding"), ("embed", "head", "v e -> e v")])]
    new = there_and_back(tmp_path, old, changes)
    np.testing.assert_array_equal(new["head"], old["embed"].T)
    flaxckpt.save(tmp_path / "trained", {**new, "head": new["head"] + 1})
    with pytest.raises(errors.OptionError, match="6 of 6 elements"):
        flaxckpt.load(tmp_path / "trained", transforms=inverse(changes))


def test_layers_alternate_between_words(tmp_path):
    old = {"layers": {str(i): np.full(2, i, np.int32) for i in range(4)}}
    changes = [remap([("layers/{(b p)}", "mlp_{p:local|global}", "b x -> x b")])]
    new = there_and_back(tmp_path, old, changes)
    assert [list(new[f"mlp_{p}"][0]) for p in ("local", "global")] == [[0, 2], [1, 3]]


@pytest.mark.parametrize("missing", ["c/w", "e/w"])
def test_words_apply_only_to_their_row(tmp_path, missing):
    """Two rows may give one name to words of different numbers, or that of a size."""
    paths = [f"{name}/w" for name in "abcde"]
    state = {path[0]: {"w": np.full((4, 3), i)} for i, path in enumerate(paths)}
    flaxckpt.save(tmp_path / "all", state)
    change = remap(
        [
            ("{n:a|b|c}/w", "params/{n:x|y|z}", "(s f) e -> s f e"),
            ("{n:d|e}/w", "params/{n:v|w}", "(s f) e -> s f e"),
        ],
        rest="error",
        s=2,
        n=1,
    )
    params = flaxckpt.load(tmp_path / "all", transforms=[change])["params"]
    assert {name: leaf[0, 0, 0] for name, leaf in params.items()} == {
        "x": 0, "y": 1, "z": 2, "v": 3, "w": 4
    }  # fmt: skip
    del state[missing[0]]
    flaxckpt.save(tmp_path / "some", state)
    with pytest.raises(errors.OptionError, match=f"1 leaf is missing:\n  {missing}"):
        flaxckpt.load(tmp_path / "some", transforms=[change])


def test_error_names_all_missing_leaves_and_nearest_ones(tmp_path):
    old = params()
    del old["layers"]["2"]["q"]
    old["layers"]["2"]["query"] = {"weight": np.zeros((8, 6), np.float32)}
    del old["qkv"]
    flaxckpt.save(tmp_path / "old", old)
    with pytest.raises(errors.OptionError) as caught:
        flaxckpt.load(tmp_path / "old", transforms=[remap(rows(), **SIZES)])
    message = str(caught.value)
    assert "remap: 2 leaves are missing" in message
    assert "layers/2/q/weight; the nearest are layers/2/query/weight" in message
    assert "qkv/weight" in message


def test_known_size_requires_all_values(tmp_path):
    flaxckpt.save(tmp_path / "old", params())
    with pytest.raises(errors.OptionError, match="layers/4/q/weight"):
        flaxckpt.load(tmp_path / "old", transforms=[remap([rows()[1]], i=5, **SIZES)])


def test_rejects_leaves_without_row_on_demand(tmp_path):
    old = {"w": np.zeros(2), "v": np.ones(2), "buffer": np.ones(3)}
    flaxckpt.save(tmp_path / "old", old)

    def load(**options):
        return flaxckpt.load(
            tmp_path / "old", transforms=[remap([("w", "u")], **options)]
        )

    assert load().keys() == {"u", "v", "buffer"}
    with pytest.raises(errors.OptionError, match=r"no row for 1 leaf:\n *v: float64"):
        load(rest="error", ignored="buffer")


def test_optional_rows_may_match_nothing(tmp_path):
    flaxckpt.save(tmp_path / "old", {"w": np.zeros(2)})
    changes = [remap([("w", "u"), Row("b", "bias", optional=True)])]
    assert flaxckpt.load(tmp_path / "old", transforms=changes).keys() == {"u"}


def test_error_of_wrong_head_count_covers_every_leaf(tmp_path):
    flaxckpt.save(tmp_path / "old", params())
    with pytest.raises(errors.OptionError) as caught:
        flaxckpt.load(tmp_path / "old", transforms=[remap([rows()[1]], h=3)])
    assert "4 leaves do not fit" in str(caught.value)
    assert "an axis of size 8 is not (h d) with h=3" in str(caught.value)


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        (("a/{i", "b"), "brace without its partner"),
        (("a/{i-1}", "b/{i}"), "is not an index"),
        (("a/{c:q|q}", "b/{c:q|q}"), "a word twice"),
        (("a/{(b r)}", "b/{r}"), "needs the size of r"),
        (("a/{i}", "b", "x i -> i x"), "must begin with i"),
        (("a/{i}", "b/{c:q|k}"), "needs a form"),
        (("a/{i}", "b/{i}", "i x -> x i"), "index of both names"),
        (("a", "b", "x y -> y"), "x is on one side only"),
        (("a", "b", "(x y -> y x"), "parentheses"),
        (("a", "b", "x y"), "needs one arrow"),
        (("a",), "a row must be"),
        (("a", 3), "a row must be"),
    ],
)
def test_rejects_malformed_rows_at_call(row, problem):
    with pytest.raises(errors.OptionError, match=problem):
        remap([row])


def test_str_of_remap_is_its_call(tmp_path):
    change = remap([("w", "u", "a b -> b a")], rest="error")
    assert str(change) == "remap([('w', 'u', 'a b -> b a')], rest='error')"


AXES = st.permutations(["a", "(b c)", "d"])


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(
    left=AXES,
    right=st.permutations(["(a d)", "c", "b"]),
    sizes=st.fixed_dictionaries(
        {name: st.integers(min_value=1, max_value=3) for name in "abcd"}
    ),
    count=st.integers(min_value=1, max_value=3),
    at=st.integers(min_value=0, max_value=3),
)
def test_inverse_undoes_every_form(tmp_path_factory, left, right, sizes, count, at):
    target = [*right]
    target.insert(at, "i")
    form = f"i {' '.join(left)} -> {' '.join(target)}"
    shape = [
        int(np.prod([sizes[name] for name in axis.strip("()").split()]))
        for axis in left
    ]
    rng = np.random.default_rng(0)
    old = {"x": {str(i): rng.normal(size=shape) for i in range(count)}}
    changes = [remap([("x/{i}", "y", form)], **sizes)]
    there_and_back(tmp_path_factory.mktemp("form"), old, changes)
