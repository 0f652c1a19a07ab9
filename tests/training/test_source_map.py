"""A run begins from a published model, by the name of a map."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from ml_collections import ConfigDict

import flaxckpt
from flaxckpt import errors, maps
from flaxckpt.configs import CheckpointConfig
from flaxckpt.transforms import cast, rename
from tests.helpers import hub_cache, published, seams


@pytest.fixture
def source(tmp_path):
    return published.write_llama(tmp_path / "published")


def params_of(source, target="linen"):
    changes = maps.llama(source, target=target)
    return flaxckpt.load(source, transforms=changes)


def state_of(source, target="linen", seed=1):
    """An initial state with the leaves of a layout, and other values."""
    params = jax.tree.map(lambda x: x * 0 + seed, params_of(source, target))
    return TrainState.create(apply_fn=None, params=params, tx=optax.adamw(1e-3))


def begin(directory, state, **options):
    with (
        flaxckpt.Checkpointer(directory) as checkpointer,
        flaxckpt.CheckpointCallback(checkpointer, every_steps=1) as on_step,
    ):
        state, start = on_step.restore_or_init(state, **options)
        on_step(start + 1, state.replace(step=start + 1))
    return state, start


def assert_equal(found, wanted):
    jax.tree.map(np.testing.assert_array_equal, found, wanted)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["auto", "llama", "a list"])
@pytest.mark.parametrize("target", ["linen", "tunix", "maxtext-scanned"])
def test_published_model_fills_training_state(tmp_path, source, name, target):
    changes = maps.llama(source, target=target, prefix="params")
    fresh = state_of(source, target)
    state, start = begin(
        tmp_path / "run",
        fresh,
        source=source,
        source_map=changes if name == "a list" else name,
    )
    assert start == 0
    assert_equal(state.params, params_of(source, target))
    assert_equal(state.opt_state, fresh.opt_state)
    [origin] = flaxckpt.metadata(tmp_path / "run").lineage
    assert origin.path == str(source)
    assert origin.transforms[0].startswith("maps.llama('llama', target=")
    assert "prefix='params'" in origin.transforms[0]


@pytest.mark.slow
def test_restarted_run_needs_no_source_or_map(tmp_path, source):
    begin(tmp_path / "run", state_of(source), source=source, source_map="auto")
    (source / "config.json").unlink()
    state, start = begin(
        tmp_path / "run",
        state_of(source_copy(tmp_path)),
        source=source,
        source_map="auto",
    )
    assert start == 1
    assert_equal(state.params, params_of(source_copy(tmp_path)))


def source_copy(tmp_path):
    path = tmp_path / "copy"
    return path if path.exists() else published.write_llama(path)


@pytest.mark.slow
def test_applies_transforms_after_map(tmp_path, source):
    fresh = state_of(source)
    layers = fresh.params["model"].pop("layers")
    fresh.params["model"]["blocks"] = layers
    fresh = TrainState.create(apply_fn=None, params=fresh.params, tx=optax.adamw(1e-3))
    changes = rename("params/model/layers/(.*)", r"params/model/blocks/\1")
    linen = maps.llama(source, target="linen", prefix="params")
    state, _ = begin(
        tmp_path / "run",
        fresh,
        source=source,
        source_map=linen,
        source_transforms=[changes, cast("params/.*", "bfloat16")],
    )
    assert_equal(state.params["model"]["blocks"], params_of(source)["model"]["layers"])
    assert len(flaxckpt.metadata(tmp_path / "run").lineage[0].transforms) == 3


@pytest.mark.slow
def test_reads_model_in_hub_cache_and_model_without_head(tmp_path, source):
    cached = hub_cache.write_model(
        tmp_path / "hub", {path.name: path for path in source.iterdir()}
    )
    state, _ = begin(
        tmp_path / "run", state_of(source), source=cached, source_map="auto"
    )
    assert_equal(state.params, params_of(source))
    alone = published.write_llama(tmp_path / "alone", base_alone=True)
    fresh = state_of(source)
    state, _ = begin(
        tmp_path / "other",
        TrainState.create(
            apply_fn=None, params=fresh.params["model"], tx=optax.adamw(1e-3)
        ),
        source=alone,
        source_map="auto",
    )
    embedding = published.llama_tensors(base_alone=True)["embed_tokens.weight"]
    assert_equal(state.params["embed_tokens"]["embedding"], embedding)


def test_fills_nnx_model(tmp_path, source):
    class Model(nnx.Module):
        def __init__(self, params):
            self.inner = nnx.data(
                jax.tree.map(lambda x: nnx.Param(jnp.zeros_like(x)), params)
            )

    model = Model(params_of(source, "tunix"))
    with (
        flaxckpt.Checkpointer(tmp_path / "run") as checkpointer,
        flaxckpt.CheckpointCallback(checkpointer, every_steps=1) as on_step,
    ):
        restored, _ = on_step.restore_or_init(model, source=source, source_map="auto")
    embedding = published.llama_tensors()["model.embed_tokens.weight"]
    assert_equal(restored.inner["embedder"]["input_embedding"][...], embedding)


@pytest.mark.slow
def test_config_names_source_and_its_map(tmp_path, source):
    options = ConfigDict({"source": str(source), "source_map": "auto"})
    config = CheckpointConfig.from_mapping(options)
    assert config.to_mapping() == dict(options)
    with (
        config.checkpointer(tmp_path / "run") as checkpointer,
        config.callback(checkpointer, every_steps=1) as on_step,
    ):
        state, start = config.restore_or_init(on_step, state_of(source))
    assert start == 0
    assert_equal(state.params, params_of(source))
    with CheckpointConfig().checkpointer(tmp_path / "new") as checkpointer:
        on_step = config.callback(checkpointer, every_steps=1)
        state, _ = CheckpointConfig().restore_or_init(on_step, {"w": jnp.ones(1)})
        assert state == {"w": jnp.ones(1)}
        found, _ = config.restore_or_init(on_step, state_of(source), source_map="llama")
        assert_equal(found.params, params_of(source))


# ---- refusals ----------------------------------------------------------------------


def refuse(tmp_path, state, match, error=errors.OptionError, **options):
    with pytest.raises(error, match=match) as caught:
        begin(tmp_path / "refused", state, **options)
    assert str(caught.value).count("\n") < 15


def test_rejects_invalid_maps_at_once(tmp_path, source):
    fresh = state_of(source)
    # Also if the run has steps already: the option is wrong at every start.
    refuse(
        tmp_path, fresh, "'auto' or one of bert, clip", source=source, source_map="lama"
    )
    refuse(tmp_path, fresh, "source_map must be a list", source=source, source_map=3)
    refuse(tmp_path, fresh, "source_map needs a source", source_map="auto")
    with pytest.raises(errors.OptionError, match="source_map must be 'auto' or one of"):
        CheckpointConfig(source_map="lama")


def test_rejects_unknown_model_type_or_missing_config(tmp_path, source):
    fresh = state_of(source)
    config = source / "config.json"
    config.write_text(json.dumps(published.LLAMA | {"model_type": "mamba"}))
    refuse(tmp_path, fresh, "'mamba'", source=source, source_map="auto")
    config.unlink()
    refuse(tmp_path, fresh, r"no config\.json beside", source=source, source_map="auto")
    (source / "config.json").symlink_to(source_copy(tmp_path) / "config.json")
    refuse(
        tmp_path,
        fresh,
        "outside of its directory",
        errors.DamagedCheckpointError,
        source=source,
        source_map="auto",
    )


def test_rejects_state_without_matching_layout(tmp_path, source):
    other = {"w": jnp.ones(3)}
    refuse(
        tmp_path,
        other,
        "no layout of maps.llama fits",
        source=source,
        source_map="auto",
    )


def test_rejects_state_of_other_shapes_before_reading(tmp_path, source, monkeypatch):
    fresh = state_of(source)
    seams.replace(monkeypatch, "arrays.read", None)
    fresh.params["model"]["norm"]["weight"] = jnp.ones(25)
    refuse(
        tmp_path,
        fresh,
        "params/model/norm/weight",
        errors.RestoreMismatchError,
        source=source,
        source_map="auto",
    )
