"""A restore fills every leaf as asked, or raises one error that names them all."""

import json
import logging
import re
import shutil

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training import train_state
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import flaxckpt
from flaxckpt import errors, transforms
from tests.helpers import chunks, old_stores, seams, strategies
from tests.helpers.optimizer_states import save_with

STATE = {
    "params": {"dense": {"kernel": jnp.ones((4, 2)), "bias": jnp.zeros(2)}},
    "opt": (np.arange(3), 1.5),
    "step": 7,
    "name": "run",
}


@pytest.fixture
def path(tmp_path):
    flaxckpt.save(tmp_path / "c", STATE)
    return tmp_path / "c"


# ---- where -----------------------------------------------------------------------


def test_loads_relative_paths_and_urls(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    flaxckpt.save("runs/a", {"x": 1})
    assert flaxckpt.load("runs/a") == {"x": 1}
    assert flaxckpt.load("./runs/../runs/a") == {"x": 1}
    assert flaxckpt.load(f"file://{tmp_path}/runs/a") == {"x": 1}


def test_run_directory_loads_newest_or_requested_step(tmp_path):
    for name in ("0", "9", "10"):
        flaxckpt.save(tmp_path / name, {"x": int(name)})
    assert flaxckpt.load(tmp_path) == {"x": 10}
    assert flaxckpt.load(tmp_path, step=0) == {"x": 0}
    assert flaxckpt.metadata(tmp_path).step == 10
    with pytest.raises(errors.CheckpointNotFoundError, match=r"no step 3.* 0, 9, 10"):
        flaxckpt.load(tmp_path, step=3)


def test_run_directory_with_only_step_0_is_not_empty(tmp_path):
    flaxckpt.save(tmp_path / "0", {"x": 0})
    assert flaxckpt.load(tmp_path) == {"x": 0}


@pytest.mark.parametrize("name", ["step_5", "00000005", "checkpoint-5"])
def test_loads_step_by_number_under_common_names(tmp_path, name):
    flaxckpt.save(tmp_path / name, {"x": 5})
    assert flaxckpt.load(tmp_path, step=5) == {"x": 5}


def test_missing_path_raises_not_found_error(tmp_path):
    with pytest.raises(errors.CheckpointNotFoundError, match="does not exist") as info:
        flaxckpt.load(tmp_path / "nowhere", STATE)
    assert isinstance(info.value, FileNotFoundError)


def test_empty_directory_raises_not_found_error(tmp_path):
    with pytest.raises(errors.CheckpointNotFoundError, match="an empty directory"):
        flaxckpt.load(tmp_path)


@pytest.mark.parametrize("kind", ["file", "directory"])
def test_foreign_files_raise_format_error(tmp_path, kind):
    path = tmp_path / "x"
    if kind == "directory":
        path.mkdir()
        (path / "model.bin").write_bytes(b"123")
    else:
        path.write_bytes(b"123")
    with pytest.raises(errors.CheckpointFormatError, match=r"file|model\.bin") as info:
        flaxckpt.load(path)
    assert isinstance(info.value, ValueError)


# ---- what ------------------------------------------------------------------------


def test_loads_subset_of_leaves(path, caplog):
    found = flaxckpt.load(path, {"params": {"dense": {"bias": jnp.ones(2)}}})
    strategies.assert_same({"params": {"dense": {"bias": jnp.zeros(2)}}}, found)
    assert "params/dense/kernel" in caplog.text
    caplog.clear()
    flaxckpt.load(path, {"params": STATE["params"]})
    assert not caplog.records
    with pytest.raises(errors.RestoreMismatchError) as info:
        flaxckpt.load(path, {"params": STATE["params"]}, unused="error")
    assert [m.leaf for m in info.value.mismatches] == ["opt/0", "opt/1", "step", "name"]
    flaxckpt.load(path, {"step": 0}, unused="ignore")


def test_error_names_wanted_and_found_of_each_mismatch(path):
    wanted = {
        "params": {
            "dense": {"kernel": jnp.ones((4, 3)), "bais": jnp.zeros(2)},
            "none": None,
        },
        "opt": (np.arange(3, dtype=np.float32), "text"),
        "step": True,
        "name": 3,
    }
    with pytest.raises(errors.RestoreMismatchError) as info:
        flaxckpt.load(path, wanted)
    assert isinstance(info.value, ValueError)
    rows = {m.leaf: (m.wanted, m.found) for m in info.value.mismatches}
    assert rows == {
        "params/dense/kernel": ("float32[4, 3]", "float32[4, 2]"),
        "params/dense/bais": ("float32[2]", "nothing (nearest: params/dense/bias)"),
        "opt/0": ("float32[3]", "int64[3]"),
        "opt/1": ("a str", "a Python float"),
        "step": ("a Python bool", "a Python int"),
        "name": ("a Python int", "a str"),
    }
    text = str(info.value)
    assert len(text.splitlines()) < 15
    assert all(leaf in text for leaf in rows)
    assert str(path) in text


@pytest.mark.parametrize(
    ("stored", "wanted", "leaf", "found"),
    [
        (
            {"a": {"b": 1, "c": 2, "d": 3}},
            {"a": 0},
            "a",
            "a container with a/b, a/c, …",
        ),
        ({"a": {"value": 1}, "ab": 2}, {"a": 0}, "a", "a container with a/value"),
        ({"a": [1]}, np.int64(0), "", "a container with a/0"),
    ],
)
def test_error_names_container_in_place_of_leaf(tmp_path, stored, wanted, leaf, found):
    flaxckpt.save(tmp_path / "c", stored)
    with pytest.raises(errors.RestoreMismatchError) as info:
        flaxckpt.load(tmp_path / "c", wanted)
    [mismatch] = info.value.mismatches
    assert (mismatch.leaf, mismatch.found) == (leaf, found)


def test_errors_stay_short_for_many_leaves(tmp_path):
    flaxckpt.save(tmp_path / "c", {"a": 1})
    with pytest.raises(errors.RestoreMismatchError) as info:
        flaxckpt.load(tmp_path / "c", {f"w{i}": jnp.ones(3) for i in range(500)})
    assert len(info.value.mismatches) == 500
    assert len(str(info.value).splitlines()) < 15


def test_error_finds_leaves_that_moved(tmp_path):
    dense = {"kernel": jnp.ones((4, 2)), "bias": jnp.zeros(2)}
    old = {"enc": dense, "head": {"kernel": jnp.ones((2, 5))}}
    new = {"enc": dense, "head": {"kernel": jnp.ones((2, 3))}}
    moments = optax.sgd(0.1, 0.9).init(new)  # fit the new head, but are no parameters

    def told(stored, wanted):
        flaxckpt.save(tmp_path / "c", stored, overwrite=True)
        with pytest.raises(errors.RestoreMismatchError) as info:
            flaxckpt.load(tmp_path / "c", wanted)
        return str(info.value)

    found = told({"model": old, "opt_state": moments}, {"params": new})
    assert "  2 leaves below params/: the checkpoint has them below model/\n" in found
    assert "params/head/kernel: wanted float32[2, 3], found nothing" in found
    rename = r'rename(r"model/(.*)", r"params/\1")'
    assert f"Pass transforms=[{rename}]. For the other leaves: pass a" in found
    assert "values and missing=" in found

    branches = "abcde"
    found = told(
        {x: {"p": dense} for x in branches}, {x: {"q": dense} for x in branches}
    )
    for x in branches:
        assert f"  2 leaves below {x}/q/: the checkpoint has them below {x}/p/" in found
    assert found.count("rename(") == 3, "and then …"

    found = told({"params": dense, "ema": dense}, {"model": dense, "average": dense})
    assert "has them" not in found, "either may be the other"
    found = told({"a": {"w": 1}, "b": {"w": 2}}, {"c": {"w": 1, "x": 1, "y": 1}})
    assert "has them" not in found, "one of three has the name by chance"


def test_error_suggests_where_to_nest_state(tmp_path):
    params = {"dense": {"kernel": jnp.ones((4, 2)), "bias": jnp.zeros(2)}}
    moments = ({"mu": params, "nu": params},)
    flaxckpt.save(tmp_path / "keys", {"opt_state": moments, "params": params})
    with pytest.raises(errors.RestoreMismatchError, match=r'as \{"params": state\}'):
        flaxckpt.load(tmp_path / "keys", params)
    with pytest.raises(
        errors.RestoreMismatchError, match="nest the state below opt_state/0/"
    ):
        flaxckpt.load(tmp_path / "keys", moments[0])
    with pytest.raises(errors.RestoreMismatchError, match='missing="init"'):
        flaxckpt.load(tmp_path / "keys", {**params, "head": jnp.ones(3)})
    flaxckpt.save(tmp_path / "pair", (params, 1))
    with pytest.raises(errors.RestoreMismatchError, match=r"as \(state,\)"):
        flaxckpt.load(tmp_path / "pair", params)
    strategies.assert_same((params,), flaxckpt.load(tmp_path / "pair", (params,)))


@pytest.mark.parametrize(
    ("saved", "wanted", "shape"),
    [
        (jnp.float32(2), jnp.zeros(1), (1,)),
        (jnp.full(1, 2.0), jnp.float32(0), ()),
        (np.full((1, 3, 1), 2.0), jnp.zeros((3, 1)), (3, 1)),
        (np.full(1, 2), 0, ()),
    ],
)
def test_error_shows_how_to_reshape_axes_of_size_one(tmp_path, saved, wanted, shape):
    def begin(scale):
        params = {"log.scale": scale, "w": jnp.ones(2)}
        return {"params": params, "opt_state": optax.adam(1e-3).init(params)}

    flaxckpt.save(tmp_path / "c", begin(saved))
    code = f'reshape(r"params/log\\.scale", {shape})'
    with pytest.raises(errors.RestoreMismatchError, match=re.escape(f"=[{code}].")):
        flaxckpt.load(tmp_path / "c", begin(wanted))
    reshape = transforms.reshape(r"params/log\.scale", shape)
    found = flaxckpt.load(tmp_path / "c", begin(wanted), transforms=[reshape])
    assert found["params"]["log.scale"] == pytest.approx(2 * np.ones(shape))


def layers(count=10):
    return {
        f"layer_{i}": {
            "kernel": jnp.full((4, 2), i + 1.0),
            "bias": jnp.full(2, i + 1.0),
        }
        for i in range(count)
    }


@pytest.mark.parametrize(
    ("stored", "wanted"),
    [
        (lambda p: {"model": {"params": p}}, lambda p: {"params": p}),
        (lambda p: {"params": p}, lambda p: {"model": {"params": p}}),
        (lambda p: p, lambda p: {"params": p}),
        (lambda p: {"params": p}, lambda p: p),
        (
            lambda p: {"a.b": {"params": p}, "other": 1},
            lambda p: {"net": p, "other": 0},
        ),
        (lambda p: {**p, "other": 1}, lambda p: {"params": p, "other": 0}),
        (lambda p: {"x": [p, 2], "y": p}, lambda p: {"z": {"params": p}, "y": p}),
    ],
)
def test_error_suggests_one_rename_for_missing_prefix(tmp_path, stored, wanted):
    flaxckpt.save(tmp_path / "c", stored(layers()))
    empty = jax.tree.map(jnp.zeros_like, layers())
    with pytest.raises(errors.RestoreMismatchError) as caught:
        flaxckpt.load(tmp_path / "c", wanted(empty))
    text = str(caught.value)
    assert len(text.splitlines()) == 3, text
    assert "20 leaves" in text.splitlines()[1]
    assert len(caught.value.mismatches) == 20
    pasted = re.search(r"transforms=(\[rename\(.*?\)\])", text)[1]
    steps = eval(pasted, {"rename": transforms.rename})
    found = flaxckpt.load(tmp_path / "c", wanted(empty), transforms=steps)
    wanted_leaves = jax.tree.leaves(wanted(layers()))
    for a, b in zip(wanted_leaves, jax.tree.leaves(found), strict=True):
        np.testing.assert_array_equal(np.shape(a), np.shape(b))
        if np.ndim(a):
            np.testing.assert_array_equal(a, b)


def test_error_suggests_rename_beside_other_mismatches(tmp_path):
    flaxckpt.save(tmp_path / "c", {"model": {"params": layers()}, "step": 3})
    wanted = {"params": layers(), "extra": jnp.ones(3), "step": 0}
    with pytest.raises(errors.RestoreMismatchError) as caught:
        flaxckpt.load(tmp_path / "c", wanted)
    text = str(caught.value)
    assert len(text.splitlines()) == 4, text
    assert r'rename(r"model/(.*)", r"\1")' in text
    assert "extra: wanted" in text
    assert 'missing="init"' in text


def test_error_suggests_rename_for_single_leaf(tmp_path):
    flaxckpt.save(tmp_path / "c", {"model": {"w": jnp.ones(3)}, "other": jnp.ones(2)})
    with pytest.raises(errors.RestoreMismatchError) as caught:
        flaxckpt.load(tmp_path / "c", {"w": jnp.zeros(3)})
    assert "w: wanted float32[3], found nothing" in str(caught.value)
    assert r'rename(r"model/(.*)", r"\1")' in str(caught.value)
    with pytest.raises(errors.RestoreMismatchError) as caught:
        flaxckpt.load(tmp_path / "c", {"net": {"w": jnp.zeros(3)}})
    assert "rename(" not in str(caught.value)


def test_error_suggests_no_rename_for_other_shapes_or_models(tmp_path):
    params = {"decoder": layers(2), "wide": {"layer_0": {"kernel": jnp.ones((9, 9))}}}
    flaxckpt.save(tmp_path / "c", params)
    for lacking in (
        {"encoder": layers(2)},  # the decoder is asked for itself
        {"narrow": {"layer_0": {"kernel": jnp.ones((4, 2))}}},
    ):
        with pytest.raises(errors.RestoreMismatchError) as caught:
            flaxckpt.load(tmp_path / "c", {**params, **lacking})
        assert "rename(" not in str(caught.value)


# ---- boxes ------------------------------------------------------------------------


def test_does_not_load_dict_value_into_leaf(tmp_path):
    flaxckpt.save(tmp_path / "c", {"w": {"value": jnp.ones(3)}, "v": jnp.ones(3)})
    wanted = {"w": jnp.zeros(3), "v": jnp.zeros(3)}
    with pytest.raises(errors.RestoreMismatchError, match=r"w: wanted .*w/value"):
        flaxckpt.load(tmp_path / "c", wanted)
    found = flaxckpt.load(
        tmp_path / "c", {**wanted, "w": jnp.full(3, 7.0)}, missing="init"
    )
    np.testing.assert_array_equal(found["w"], np.full(3, 7.0))


def test_unboxes_values_of_other_formats_and_conversions(tmp_path):
    model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    kernel = model.kernel.get_value()
    boxed = {"kernel": {"value": kernel}, "bias": {"value": jnp.ones(2)}}
    save_with("orbax", tmp_path / "orbax", boxed)
    plain = {"kernel": jnp.zeros((3, 2)), "bias": jnp.zeros(2)}
    found = flaxckpt.load(tmp_path / "orbax", plain)
    np.testing.assert_array_equal(found["kernel"], kernel)
    flaxckpt.convert(tmp_path / "orbax", tmp_path / "ours")
    found = flaxckpt.load(tmp_path / "ours", nnx.Linear(3, 2, rngs=nnx.Rngs(1)))
    np.testing.assert_array_equal(found.kernel.get_value(), kernel)


def test_does_not_unbox_dict_with_several_entries(tmp_path):
    for name, more in (("leaf", jnp.ones(2)), ("container", {"deep": jnp.ones(2)})):
        save_with("orbax", tmp_path / name, {"w": {"value": jnp.ones(3), "more": more}})
        with pytest.raises(errors.RestoreMismatchError):
            flaxckpt.load(tmp_path / name, {"w": jnp.zeros(3)})


def test_missing_leaves_can_keep_their_values(path):
    wanted = {**STATE, "head": jnp.full(3, 9.0), "label": "new"}
    with pytest.raises(errors.RestoreMismatchError, match="head"):
        flaxckpt.load(path, wanted)
    found = flaxckpt.load(path, wanted, missing="init")
    strategies.assert_same(wanted, found)
    abstract = {**STATE, "head": jax.ShapeDtypeStruct((3,), jnp.float32)}
    with pytest.raises(errors.RestoreMismatchError, match="no initial value"):
        flaxckpt.load(path, abstract, missing="init")


@pytest.mark.parametrize("option", [{"missing": "skip"}, {"unused": "maybe"}])
def test_rejects_invalid_options(path, option):
    with pytest.raises(errors.OptionError, match=next(iter(option))):
        flaxckpt.load(path, STATE, **option)


def test_casts_floats_but_only_widens_ints(tmp_path):
    saved = {"f": jnp.arange(4.0) / 3, "i": np.arange(3, dtype=np.int16)}
    flaxckpt.save(tmp_path / "c", saved)
    wanted = {"f": jnp.zeros(4, jnp.bfloat16), "i": np.zeros(3, np.int32)}
    found = flaxckpt.load(tmp_path / "c", wanted)
    strategies.assert_same(
        {"f": saved["f"].astype(jnp.bfloat16), "i": saved["i"].astype(np.int32)}, found
    )
    with pytest.raises(errors.RestoreMismatchError, match=r"int8\[3\].*int16\[3\]"):
        flaxckpt.load(tmp_path / "c", {"i": np.zeros(3, np.int8)})


def test_loads_python_number_into_any_fitting_array(tmp_path):
    flaxckpt.save(tmp_path / "c", {"step": 300, "rate": 0.5})
    wanted = {"step": jnp.int32(0), "rate": jnp.float32(0)}
    strategies.assert_same(
        {"step": jnp.int32(300), "rate": jnp.float32(0.5)},
        flaxckpt.load(tmp_path / "c", wanted),
    )
    with pytest.raises(
        errors.RestoreMismatchError, match=r"wanted .*, found the number 300"
    ):
        flaxckpt.load(tmp_path / "c", {"step": np.zeros((), np.uint8)})


def test_loads_array_as_requested_python_number(tmp_path):
    flaxckpt.save(tmp_path / "c", {"step": jnp.int32(300), "rate": jnp.float32(0.5)})
    found = flaxckpt.load(tmp_path / "c", {"step": 0, "rate": 0.0})
    strategies.assert_same({"step": 300, "rate": 0.5}, found)


def test_eval_shape_template_restores_python_int_step(tmp_path):
    def create():
        return train_state.TrainState.create(
            apply_fn=None, params={"w": jnp.ones(3)}, tx=optax.adam(1e-3)
        )

    flaxckpt.save(tmp_path / "c", create())
    found = flaxckpt.load(tmp_path / "c", jax.eval_shape(create))
    assert isinstance(found.step, jax.Array)
    assert found.step.weak_type
    assert int(found.step) == 0


def test_rejects_key_of_another_implementation(tmp_path):
    flaxckpt.save(tmp_path / "c", {"key": jax.random.key(0)})
    with pytest.raises(errors.RestoreMismatchError, match=r"rbg.*threefry2x32"):
        flaxckpt.load(tmp_path / "c", {"key": jax.random.key(0, impl="rbg")})
    abstract = jax.eval_shape(lambda: {"key": jax.random.key(0)})
    strategies.assert_same_bits(
        jax.random.key(0), flaxckpt.load(tmp_path / "c", abstract)["key"]
    )


def test_does_not_silently_truncate_64_bit_arrays(tmp_path):
    with jax.enable_x64(True):
        flaxckpt.save(tmp_path / "c", {"n": jnp.arange(3), "w": jnp.ones(2)})
        strategies.assert_same_bits(jnp.arange(3), flaxckpt.load(tmp_path / "c")["n"])
    with pytest.raises(errors.RestoreMismatchError, match="jax_enable_x64"):
        flaxckpt.load(tmp_path / "c")
    with pytest.raises(errors.RestoreMismatchError, match="Set jax_enable_x64, as wh"):
        flaxckpt.load(tmp_path / "c", {"n": jnp.zeros(3, jnp.int32)})
    found = flaxckpt.load(tmp_path / "c", {"n": np.zeros(3, np.int64)})
    np.testing.assert_array_equal(found["n"], np.arange(3))


def test_indivisible_sharding_raises_mismatch_error(path):
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    wanted = jax.ShapeDtypeStruct(
        (4, 2), jnp.float32, sharding=NamedSharding(mesh, P("x"))
    )
    with pytest.raises(errors.RestoreMismatchError, match="params/dense/kernel") as e:
        flaxckpt.load(path, {"params": {"dense": {"kernel": wanted}}})
    assert str(e.value).splitlines()[-1].startswith("Give the state shardings whose")


def _template(mesh, kind):
    """A template that names the axes of the current mesh, and no devices."""

    def create():
        tree = {"w": jnp.zeros((8, 4)), "b": jnp.zeros(3)}
        return jax.tree.map(jnp.negative, tree)

    if kind is AxisType.Explicit:
        split = NamedSharding(mesh, P("x"))
        return jax.eval_shape(
            lambda w: {"w": -w, "b": jnp.zeros(3)},
            jax.ShapeDtypeStruct((8, 4), jnp.float32, sharding=split),
        )
    template = jax.eval_shape(create)
    split = NamedSharding(mesh.abstract_mesh, P("x"))
    template["w"] = jax.ShapeDtypeStruct((8, 4), jnp.float32, sharding=split)
    return template


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_template_without_devices_uses_current_mesh(tmp_path, kind):
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(kind,) * 2)
    state = {"w": jnp.arange(32.0).reshape(8, 4), "b": jnp.ones(3)}
    flaxckpt.save(tmp_path / "run" / "1", state)
    with jax.set_mesh(mesh), flaxckpt.Checkpointer(tmp_path / "run") as run:
        template = _template(mesh, kind)
        assert not flaxckpt.plan(tmp_path / "run", template).problems
        start = flaxckpt.CheckpointCallback(run, every_steps=1)
        for restored in (
            flaxckpt.load(tmp_path / "run", template),
            flaxckpt.load_async(tmp_path / "run", template).wait(),
            run.restore(template),
            start.restore_or_init(template)[0],
        ):
            strategies.assert_same_bits(restored["w"], state["w"])
            want = NamedSharding(mesh, P("x"))
            assert restored["w"].sharding.is_equivalent_to(want, 2)
            assert restored["w"].sharding.mesh == mesh


def test_places_unsharded_arrays_alike_on_thread(path):
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        here = flaxckpt.load(path)["params"]["dense"]["kernel"]
        there = flaxckpt.load_async(path).wait()["params"]["dense"]["kernel"]
    assert here.sharding == there.sharding


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_restores_nnx_templates_of_current_mesh(tmp_path, kind):
    class Model(nnx.Module):
        def __init__(self):
            init = nnx.with_partitioning(nnx.initializers.ones_init(), (None, "x"))
            self.layer = nnx.Linear(2, 8, rngs=nnx.Rngs(0), kernel_init=init)

    def create():
        model = Model()
        return model, nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)

    mesh = jax.make_mesh((8,), ("x",), axis_types=(kind,))
    with jax.set_mesh(mesh):
        flaxckpt.save(tmp_path / "c", create())
        template = nnx.eval_shape(create)
        if template[0].layer.kernel.get_value().sharding is None:
            pytest.skip("the templates of this version of Flax have no shardings")
        model, optimizer = flaxckpt.load(tmp_path / "c", template)
        fresh, _ = flaxckpt.load(
            tmp_path / "c", nnx.eval_shape(create), optimizer="reinit"
        )
    assert model.layer.kernel[...].sharding == NamedSharding(mesh, P(None, "x"))
    assert optimizer.opt_state[0].mu.layer.kernel[...].sharding.mesh == mesh
    assert fresh.layer.kernel[...].sharding.mesh == mesh


def test_computed_leaves_ignore_axes_of_current_mesh(path):
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Explicit,))
    split = NamedSharding(mesh.abstract_mesh, P(None, "x"))

    def widen(tree):
        return {"w": jnp.tile(tree["params"]["dense"]["kernel"].T, (1, 2)) * 3}

    kernel = "params/dense/kernel"
    with jax.set_mesh(mesh):
        wanted = {"w": jax.ShapeDtypeStruct((2, 8), jnp.float32, sharding=split)}
        by_function = flaxckpt.load(
            path, wanted, transforms=[transforms.from_function(widen)]
        )
        wanted = {"w": jax.ShapeDtypeStruct((2, 4), jnp.float32)}
        by_transpose = flaxckpt.load(
            path,
            wanted,
            transforms=[transforms.rename(kernel, "w"), transforms.transpose("w")],
        )
    assert by_function["w"].sharding == NamedSharding(mesh, P(None, "x"))
    np.testing.assert_array_equal(by_function["w"], np.full((2, 8), 3))
    np.testing.assert_array_equal(by_transpose["w"], np.ones((2, 4)))


@pytest.mark.parametrize(
    "forbid",
    [
        lambda: jax.debug_nans(True),
        lambda: jax.debug_infs(True),
        lambda: jax.transfer_guard("disallow"),
    ],
    ids=["NaNs", "infinities", "transfers"],
)
def test_settings_that_forbid_values_or_transfers_do_not_count(tmp_path, forbid):
    state = train_state.TrainState.create(
        apply_fn=None,
        params={"w": jnp.array([jnp.nan, jnp.inf]), "host": np.full(2, np.nan)},
        tx=optax.contrib.schedule_free_adamw(),  # has a copy of the parameters
    )
    swap = [transforms.permute("params/.*", [1, 0], 0)]
    with forbid():
        flaxckpt.save(tmp_path / "c", state, transforms=swap)
        flaxckpt.convert(tmp_path / "c", tmp_path / "d", transforms=swap)
        same = flaxckpt.load(tmp_path / "d", state)
        fresh = flaxckpt.load(
            tmp_path / "c", state, transforms=swap, optimizer="reinit"
        )
    strategies.assert_same_state(state, same)
    strategies.assert_same_state(state.params, fresh.params)
    np.testing.assert_array_equal(fresh.opt_state.z["w"], state.params["w"])


def test_error_explains_how_to_give_abstract_mesh_devices(path):
    mesh = AbstractMesh((4,), ("x",))
    split = NamedSharding(mesh, P("x"))
    kernel = jax.ShapeDtypeStruct((4, 2), jnp.float32, sharding=split)
    wanted = {"params": {"dense": {"kernel": kernel}}}
    ways = r"jax.set_mesh\(mesh\).* abstract_state\(state, mesh=mesh\)"
    for options in ({}, {"optimizer": "reinit"}, {"missing": "init"}):
        with pytest.raises(errors.RestoreMismatchError, match=f"devices(?s:.*){ways}"):
            flaxckpt.load(path, wanted, **options)
    with (
        jax.set_mesh(jax.make_mesh((8,), ("x",))),
        pytest.raises(errors.RestoreMismatchError, match=r"current mesh .*8"),
    ):
        flaxckpt.load(path, wanted)
    absent = {"params": {"other": kernel}}
    with pytest.raises(errors.RestoreMismatchError, match=ways):
        flaxckpt.load(path, absent, missing="init")
    real = jax.make_mesh((4,), ("x",), devices=jax.devices()[:4])
    restored = flaxckpt.load(path, flaxckpt.abstract_state(wanted, mesh=real))
    assert restored["params"]["dense"]["kernel"].sharding.mesh == real


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg", "unsafe_rbg"])
@pytest.mark.parametrize("shape", [(), (3,)])
def test_keys_and_key_data_restore_into_each_other(tmp_path, impl, shape):
    key = jax.random.key(5, impl=impl)
    keys = jax.random.split(key, shape) if shape else key
    data = jax.random.key_data(keys)
    flaxckpt.save(tmp_path / "keys", {"rng": keys})
    flaxckpt.save(tmp_path / "data", {"rng": data})
    for name in ("keys", "data"):
        strategies.assert_same_bits(
            data, flaxckpt.load(tmp_path / name, {"rng": jnp.zeros_like(data)})["rng"]
        )
        found = flaxckpt.load(tmp_path / name, {"rng": keys})["rng"]
        assert found.dtype == keys.dtype
        strategies.assert_same_bits(data, jax.random.key_data(found))


def test_error_for_mismatched_keys_suggests_fix(tmp_path):
    flaxckpt.save(tmp_path / "rbg", {"rng": jax.random.key(0, impl="rbg")})
    with pytest.raises(errors.RestoreMismatchError, match=r"jax.random.key\(0, .*rbg"):
        flaxckpt.load(tmp_path / "rbg", {"rng": jax.random.key(0)})
    for other in (jnp.zeros(2, jnp.uint32), jnp.zeros(4, jnp.int32), jnp.zeros(4)):
        with pytest.raises(errors.RestoreMismatchError, match="wrap_key_data"):
            flaxckpt.load(tmp_path / "rbg", {"rng": other})


def test_logs_one_line_per_save_and_restore(tmp_path, caplog):
    with caplog.at_level(logging.INFO, logger="flaxckpt"):
        flaxckpt.save(tmp_path / "c", STATE)
        flaxckpt.load(tmp_path / "c")
    assert [record.getMessage().split()[0] for record in caplog.records] == [
        "saved",
        "restored",
    ]


# ---- metadata --------------------------------------------------------------------


def test_metadata_describes_all_leaves_without_reading_arrays(path):
    for file in (path / "state").rglob("c/*"):
        if file.is_file():
            file.unlink()
    found = flaxckpt.metadata(path)
    assert list(found.leaves) == [
        "params/dense/kernel",
        "params/dense/bias",
        "opt/0",
        "opt/1",
        "step",
        "name",
    ]
    kernel = found.leaves["params/dense/kernel"]
    assert (kernel.shape, kernel.dtype, kernel.chunk_shape) == (
        (4, 2),
        "float32",
        (4, 2),
    )
    assert found.format == "flaxckpt"
    assert found.total_bytes == 4 * 8 + 4 * 2 + 8 * 3 + 8 + 8
    assert found.step is None
    assert found.created is not None
    assert found.committed is not None
    assert found.created <= found.committed
    assert not found.has_dataset


# ---- damage ----------------------------------------------------------------------


def array_files(path):
    metadata = ("zarr.json", "manifest.ocdbt")
    files = [
        p
        for p in (path / "state").rglob("*")
        if p.is_file() and p.name not in metadata and not p.name.startswith("_")
    ]
    return [p for p in files if "array_metadatas" not in p.parts]


@pytest.mark.parametrize("is_old", [False, True])
def test_detects_flipped_bit_in_array(tmp_path, is_old):
    # Incompressible, so that every byte of the file matters.
    state = {"w": np.random.default_rng(0).bytes(4096)}
    state["w"] = np.frombuffer(state["w"], np.uint8)
    path = tmp_path / "c"
    flaxckpt.save(path, state)
    if is_old:
        old_stores.make_directories(path)
    largest = max(array_files(path), key=lambda p: p.stat().st_size)
    content = largest.read_bytes()
    for place in range(0, len(content), 97):
        flipped = bytearray(content)
        flipped[place] ^= 4
        largest.write_bytes(flipped)
        with pytest.raises(errors.DamagedCheckpointError):
            flaxckpt.load(path)
    largest.write_bytes(content)
    strategies.assert_same(state, flaxckpt.load(path))


@pytest.mark.parametrize("is_old", [False, True])
def test_error_names_missing_and_truncated_chunks(tmp_path, is_old):
    state = {name: np.ones((512, 512)) for name in ("gone", "short", "fine")}
    path = tmp_path / "c"
    flaxckpt.save(path, state)
    if is_old:
        old_stores.make_directories(path)
    chunks.place(path / "state", "gone/c.0.0")[0].unlink()
    chunk, *_ = chunks.place(path / "state", "short/c.0.0")
    chunk.write_bytes(chunk.read_bytes()[:-100])
    with pytest.raises(errors.DamagedCheckpointError) as info:
        flaxckpt.load(path)
    assert isinstance(info.value, OSError)
    assert "gone: " in str(info.value)
    assert "short: " in str(info.value)
    assert "fine: " not in str(info.value)
    assert len(str(info.value).splitlines()) < 15
    strategies.assert_same(
        {"fine": state["fine"]}, flaxckpt.load(path, {"fine": state["fine"]})
    )


def test_detects_missing_metadata(path):
    (path / "_CHECKPOINT_METADATA").unlink()
    with pytest.raises(errors.DamagedCheckpointError, match="is missing"):
        flaxckpt.load(path)


@pytest.mark.parametrize(
    "name", ["flaxckpt.json", "_CHECKPOINT_METADATA", "state/_strings.json"]
)
@pytest.mark.parametrize("damage", ["flip", "cut", "empty"])
def test_detects_changed_metadata(path, name, damage):
    file = path / name
    content = bytearray(file.read_bytes())
    if damage == "flip":
        content[len(content) // 2] ^= 1
    file.write_bytes(content[: {"flip": None, "cut": -10, "empty": 0}[damage]])
    with pytest.raises(errors.DamagedCheckpointError, match="has changed"):
        flaxckpt.load(path)


def manifest_of(leaf):
    """A manifest whose only leaf is `leaf`."""
    manifest = {"version": 1, "digests": {}, "ocdbt": False, "structure": "a"}
    return json.dumps({**manifest, "leaves": [{"path": "a", **leaf}]}).encode()


@pytest.mark.parametrize(
    "manifest",
    [
        b"[]",
        b"{}",
        b"[" * 100_000,
        b'{"version": 1}',
        b'{"version": 1, "structure": [], "leaves": [], "digests": {}, "ocdbt": 0}',
        manifest_of(
            {"type": "jax.Array", "dtype": "object", "shape": [], "chunks": []}
        ),
        manifest_of(
            {"type": "jax.Array", "dtype": "int8", "shape": [-1], "chunks": [1]}
        ),
        manifest_of(
            {"type": "jax.Array", "dtype": "int8", "shape": "no", "chunks": [1]}
        ),
        manifest_of({"type": "pickle"}),
        b'{"version": 1, "structure": "a", "leaves": [], "digests": {}, "ocdbt": 0}',
    ],
)
def test_rejects_invalid_manifest(path, manifest):
    (path / "commit_success.txt").unlink()
    (path / "flaxckpt.json").write_bytes(manifest)
    with pytest.raises((errors.DamagedCheckpointError, errors.CheckpointFormatError)):
        flaxckpt.load(path)


def test_error_names_version_of_newer_manifest(path):
    manifest = json.loads((path / "flaxckpt.json").read_text())
    (path / "commit_success.txt").unlink()
    (path / "flaxckpt.json").write_text(json.dumps({**manifest, "version": 99}))
    with pytest.raises(errors.CheckpointFormatError, match="version 99"):
        flaxckpt.load(path)


def test_detects_array_shape_differing_from_record(tmp_path):
    path = tmp_path / "c"
    flaxckpt.save(path, {"w": np.ones((4, 4))})
    old_stores.make_directories(path)
    file = path / "state/w/zarr.json"
    file.write_text(file.read_text().replace('"shape":[4,4]', '"shape":[8,4]'))
    with pytest.raises(errors.DamagedCheckpointError, match="recorded as"):
        flaxckpt.load(path)


def test_failed_restore_leaves_template_unchanged(path):
    template = {"params": {"dense": {"kernel": jnp.full((4, 2), 5.0)}}, "new": 1}
    before = jax.tree.map(np.array, template)
    with pytest.raises(errors.RestoreMismatchError):
        flaxckpt.load(path, template)
    strategies.assert_same(before, jax.tree.map(np.array, template))


@pytest.mark.parametrize("memory_map", [True, False])
def test_does_not_mix_checkpoint_replaced_during_load(
    tmp_path, monkeypatch, memory_map
):
    """Half of it would be of one save, half of the other, each with good checksums."""
    path = tmp_path / "c"
    flaxckpt.save(path, {"w": np.ones(4), "v": np.ones(4)})
    real = seams.current("arrays.begin_read")

    def begin(job, *args):
        if job.wanted.path == "v":
            other = {"w": np.zeros(4), "v": np.zeros(4)}
            flaxckpt.save(path, other, overwrite=True)
        return real(job, *args)

    seams.replace(monkeypatch, "arrays.begin_read", begin)
    with pytest.raises(errors.DamagedCheckpointError, match="replaced or deleted"):
        flaxckpt.load(path, memory_map=memory_map)
    monkeypatch.undo()
    strategies.assert_same(flaxckpt.load(path)["w"], np.zeros(4))


def test_reports_checkpoint_deleted_during_load(tmp_path, monkeypatch):
    path = tmp_path / "c"
    flaxckpt.save(path, {"w": np.ones(4)})
    real = seams.current("arrays.begin_read")

    def begin(work, *args):
        shutil.rmtree(path)
        return real(work, *args)

    seams.replace(monkeypatch, "arrays.begin_read", begin)
    with pytest.raises(errors.DamagedCheckpointError, match="replaced or deleted"):
        flaxckpt.load(path)


@pytest.mark.parametrize(
    ("found", "wanted"),
    [("int4", "int8"), ("uint4", "uint8"), ("int2", "int4"), ("uint2", "uint16")],
)
def test_widens_small_integers_but_never_narrows(tmp_path, found, wanted):
    limits = ml_dtypes.iinfo(found)
    low, high = limits.min, limits.max
    values = np.array([low, high, 0, 1], np.dtype(found))
    flaxckpt.save(tmp_path / "c", {"w": values})
    like = np.zeros(4, np.dtype(wanted))
    again = flaxckpt.load(tmp_path / "c", {"w": like})["w"]
    assert again.dtype == like.dtype
    assert [int(value) for value in again] == [low, high, 0, 1]
    flaxckpt.save(tmp_path / "d", {"w": like})
    with pytest.raises(errors.RestoreMismatchError):
        flaxckpt.load(tmp_path / "d", {"w": values})
