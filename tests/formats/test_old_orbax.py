"""What Orbax wrote beside arrays, now and in old releases."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import flaxckpt
from flaxckpt import errors
from flaxckpt.policies import BestN
from tests import GOLDEN
from tests.golden import make_orbax_old

OLD = GOLDEN / "old-orbax-0.5.23"
STATE = {"w": jnp.arange(6.0).reshape(2, 3)}


# ---- metadata of a run -----------------------------------------------------------


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("metadata", {"model": "tiny", "custom": {"n": 3}}),  # Orbax 0.5 to 0.10
        ("_ROOT_METADATA", {"custom": {"model": "tiny"}}),  # 0.11.0 to 0.11.5
        (
            "_ROOT_METADATA",
            {"internal_metadata": {}, "custom_metadata": {"model": "tiny"}},
        ),
    ],
)
def test_reads_run_metadata_of_all_orbax_releases(tmp_path, file, content):
    directory = tmp_path / "metadata"
    directory.mkdir()
    (directory / file).write_text(json.dumps(content))
    (directory / "_CHECKPOINT_METADATA").write_text('{"init_timestamp_nsecs": 1}')
    with flaxckpt.Checkpointer(tmp_path) as run:
        assert run.run_metadata["model"] == "tiny"
        assert run.run_metadata == (
            content if file == "metadata" else {"model": "tiny"}
        )
    with flaxckpt.Checkpointer(tmp_path, metadata={"model": "new"}) as run:
        assert run.run_metadata == {"model": "new"}


def test_reads_step_metadata_of_old_orbax_releases(tmp_path):
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "a", STATE)
    file = tmp_path / "a" / "_CHECKPOINT_METADATA"
    found = json.loads(file.read_text())
    del found["custom_metadata"]
    file.write_text(json.dumps(found | {"custom": {"note": 3}}))  # 0.11.0 to 0.11.5
    assert flaxckpt.metadata(tmp_path / "a").custom == {"note": 3}


# ---- shardings ----------------------------------------------------------------------


def test_metadata_reports_orbax_sharding(tmp_path):
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("x", "y"))
    specs = {
        "rows": P("x"),
        "both": P(("x", "y"), None),
        "last": P(None, "y"),
        "whole": P(),
    }
    state = {
        name: jax.device_put(jnp.arange(32.0).reshape(8, 4), NamedSharding(mesh, spec))
        for name, spec in specs.items()
    }
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "a", {**state, "one": jnp.ones(3), "n": 3})
    leaves = flaxckpt.metadata(tmp_path / "a").leaves
    assert {name: leaves[name].spec for name in specs} == specs
    assert [leaves[name].shard_shape for name in specs] == [
        (4, 4),
        (2, 4),
        (8, 2),
        None,
    ]
    assert (leaves["one"].spec, leaves["one"].shard_shape) == (None, None)
    made = flaxckpt.load(tmp_path / "a", state)
    jax.tree.map(np.testing.assert_array_equal, made, state)

    file = tmp_path / "a" / "_sharding"
    good = json.loads(file.read_text())
    for bad in (
        b"{",
        b"[]",
        b'{"%": 1, "cm93cw==": "{", "Ym90aA==": "[]"}',
        json.dumps({name: text.replace("4, 4", "x") for name, text in good.items()}),
        json.dumps({name: text.replace('"y"', '"z"') for name, text in good.items()}),
        json.dumps(
            {name: text.replace("[2, 2]", "[0]") for name, text in good.items()}
        ),
        json.dumps({name: text.replace('"y"', "3") for name, text in good.items()}),
        json.dumps(
            {name: text.replace("null", '"x", "x"') for name, text in good.items()}
        ),
        json.dumps(dict.fromkeys(good, '{"sharding_type": "NamedSharding"}')),
    ):
        file.write_bytes(bad if isinstance(bad, bytes) else bad.encode())
        assert flaxckpt.metadata(tmp_path / "a").leaves["one"].shape == (3,)
        np.testing.assert_array_equal(
            flaxckpt.load(tmp_path / "a")["rows"], state["rows"]
        )


# ---- items that are no trees -----------------------------------------------------


def test_json_item_is_not_reported_as_damaged(tmp_path):
    with ocp.Checkpointer(ocp.JsonCheckpointHandler()) as checkpointer:
        checkpointer.save(tmp_path / "alone", args=ocp.args.JsonSave({"a": 1}))
    with ocp.CheckpointManager(tmp_path / "run", item_names=("config",)) as manager:
        config = ocp.args.JsonSave({"lang": "en"})
        for step in (1, 2):
            manager.save(step, args=ocp.args.Composite(config=config))
    for path in (
        tmp_path / "alone",
        tmp_path / "run" / "1" / "config",
        tmp_path / "run" / "1",
        tmp_path / "run",
    ):
        with pytest.raises(errors.CheckpointFormatError, match="JSON") as info:
            flaxckpt.load(path)
        assert "json.loads" in str(info.value)
        assert not isinstance(info.value, errors.DamagedCheckpointError)
    run = flaxckpt.Checkpointer(tmp_path / "run")
    assert run.steps() == [1, 2]
    with pytest.raises(errors.CheckpointFormatError, match="config: JsonCheckpoint"):
        run.restore()
    assert run.damaged() == {}


def test_step_without_tree_is_damaged_despite_json_item(tmp_path):
    with ocp.CheckpointManager(tmp_path, item_names=("state", "config")) as manager:
        items = ocp.args.Composite(
            state=ocp.args.StandardSave(STATE), config=ocp.args.JsonSave({"a": 1})
        )
        manager.save(1, args=items)
    np.testing.assert_array_equal(flaxckpt.load(tmp_path)["w"], STATE["w"])
    (tmp_path / "1" / "state" / "_METADATA").unlink()
    with pytest.raises(errors.DamagedCheckpointError):
        flaxckpt.load(tmp_path / "1")


# ---- old releases ----------------------------------------------------------------


class Layer(nnx.Module):
    def __init__(self, params):
        for name, value in params.items():
            setattr(self, name, nnx.Param(jnp.zeros_like(value)))


class Model(nnx.Module):
    def __init__(self, layers):
        for name, params in layers.items():
            setattr(self, name, Layer(params))


def test_restores_flax_0_8_nnx_state_with_optimizer():
    values = make_orbax_old.values(0)
    model = Model(values)
    params = nnx.state(model)
    wanted = {"params": params, "opt_state": optax.adam(0.1).init(params)}
    made = flaxckpt.load(OLD / "nnx", wanted)
    assert int(made["opt_state"][0].count) == 1
    for layer, names in values.items():
        for name, value in names.items():
            found = made["params"][layer][name]
            np.testing.assert_array_equal(found[...], value)
            np.testing.assert_allclose(made["opt_state"][0].mu[layer][name][...], 0.1)
    # Under another chain, by what the leaves are.
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.1))
    made = flaxckpt.load(OLD / "nnx", wanted | {"opt_state": tx.init(params)})
    np.testing.assert_allclose(made["opt_state"][1][0].mu["l"]["bias"][...], 0.1)
    # Into the objects, and without a state.
    made = flaxckpt.load(OLD / "nnx", {"params": Model(values)})
    np.testing.assert_array_equal(made["params"].l.kernel[...], values["l"]["kernel"])
    plain = flaxckpt.load(OLD / "nnx")["params"]["b"]["scale"]
    np.testing.assert_array_equal(plain["raw_value"], values["b"]["scale"])


def test_reads_whole_run_of_old_orbax_release():
    run = flaxckpt.Checkpointer(
        OLD / "run", read_only=True, keep=[BestN(1, "eval/loss", "min")]
    )
    assert run.run_metadata == make_orbax_old.METADATA
    assert run.metrics(1) == {
        "eval/loss": 0.5,
        "eval/recall/0": 0.25,
        "eval/recall/1": 1,
    }
    assert run.explain() == {1: ["newest", "BestN(1, 'eval/loss', 'min')"]}
    described = run.metadata(1)
    assert described.leaves["kernel"].spec == P("x")
    assert described.leaves["kernel"].shard_shape == (2, 3)
    kernel = make_orbax_old.values(0)["l"]["kernel"]
    np.testing.assert_array_equal(run.restore()["kernel"], kernel)
    assert flaxckpt.verify(OLD / "run", step=1).ok
    assert flaxckpt.Checkpointer(OLD / "run", read_only=True).steps() == [1]
