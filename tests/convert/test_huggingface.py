"""Parameters of a training state become a model directory of Hugging Face."""

import json
import logging
import os

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx, serialization
from flax.core import FrozenDict
from flax.training.train_state import TrainState
from safetensors import numpy as safetensors

import flaxckpt
from flaxckpt import errors, maps
from flaxckpt.transforms import cast, drop, map_leaf, rename, stack, transpose
from tests.convert.reads import stopping
from tests.helpers import hub_cache, seams
from tests.helpers import published as hf

CONFIG = {"model_type": "tiny", "hidden_size": 4}


def published(dtype="float32", layers=3):
    """A model as a torch program would publish it."""
    rng = np.random.default_rng(0)

    def draw(*shape):
        return np.asarray(jnp.asarray(rng.normal(size=shape), dtype))

    names = {"embed.weight": (7, 4), "norm.weight": (4,), "lm_head.weight": (7, 4)}
    for i in range(layers):
        names |= {f"layers.{i}.up.weight": (6, 4), f"layers.{i}.up.bias": (6,)}
    return {name: draw(*shape) for name, shape in names.items()}


def linen_map(prefix="params/"):
    """From the published names to those of a linen model."""
    return [
        rename("embed/weight", f"{prefix}embed/embedding"),
        rename("norm/weight", f"{prefix}norm/scale"),
        rename("lm_head/weight", f"{prefix}head/kernel"),
        rename(r"layers/(\d+)/up/weight", rf"{prefix}layers_\1/up/kernel"),
        rename(r"layers/(\d+)/up/bias", rf"{prefix}layers_\1/up/bias"),
        transpose(f"{prefix}.*/kernel"),
    ]


@pytest.fixture
def source(tmp_path):
    """A directory as published: arrays, config and tokenizer."""
    path = tmp_path / "published"
    path.mkdir()
    safetensors.save_file(published(), path / "model.safetensors", {"format": "pt"})
    (path / "config.json").write_text(json.dumps(CONFIG))
    for name in ("tokenizer.json", "vocab.txt", "generation_config.json"):
        (path / name).write_text(f'"{name}"')
    for name in ("README.md", "adapter_config.json", "pytorch_model.bin"):
        (path / name).write_text("not copied")
    return path


def read_all(directory):
    arrays = {}
    for file in directory.glob("*.safetensors"):
        arrays |= safetensors.load_file(file)
    return arrays


def read_config(directory):
    return json.loads((directory / "config.json").read_text())


def assert_published(directory, wanted=None):
    found, wanted = read_all(directory), wanted or published()
    assert found.keys() == wanted.keys()
    for name, array in wanted.items():
        assert found[name].dtype == array.dtype
        np.testing.assert_array_equal(found[name], array, name)


def loaded(source):
    return flaxckpt.load(source, transforms=linen_map())["params"]


def export(tmp_path, name="x", out="out", **options):
    """Exports a checkpoint, unless told otherwise by the map of the linen model."""
    return flaxckpt.export_huggingface(
        tmp_path / name, tmp_path / out, **{"map": linen_map()} | options
    )


STATES = {
    "TrainState": lambda params: TrainState.create(
        apply_fn=None, params=params, tx=optax.adamw(1e-3)
    ),
    "FrozenDict": lambda params: FrozenDict({"params": params, "step": 3}),
    "chained": lambda params: {
        "params": params,
        "tx": optax.chain(
            optax.clip_by_global_norm(1.0), optax.adafactor(1e-3), optax.ema(0.9)
        ).init(params),
        "rng": jax.random.key(1),
        "note": "text",
        "count": jnp.zeros((), jnp.int32),
    },
}


@pytest.mark.parametrize("kind", STATES)
def test_model_round_trips_bit_for_bit(tmp_path, source, kind):
    with flaxckpt.Checkpointer(tmp_path / "run") as checkpointer:
        checkpointer.save(5, STATES[kind](loaded(source)))
    result = export(tmp_path, "run", tokenizer=source)
    assert result.path == str(tmp_path / "out")
    assert_published(tmp_path / "out")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        *("config.json", "generation_config.json", "model.safetensors"),
        *("tokenizer.json", "vocab.txt"),
    ]
    assert read_config(tmp_path / "out") == CONFIG | {"dtype": "float32"}
    with (tmp_path / "out/model.safetensors").open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    assert header["__metadata__"] == {"format": "pt"}


def test_exports_nnx_and_orbax_states(tmp_path, source):
    ocp = pytest.importorskip("orbax.checkpoint")

    class Model(nnx.Module):
        def __init__(self, arrays):
            self.embed = nnx.Param(arrays["embed.weight"])
            self.drop = nnx.Dropout(0.1, rngs=nnx.Rngs(0))
            self.norm = nnx.Param(arrays["norm.weight"])

    arrays = {k: v for k, v in published().items() if k[:2] in ("em", "no")}
    model = Model(jax.tree.map(jnp.asarray, arrays))
    names = rename({"embed/weight": "model/embed", "norm/weight": "model/norm"})
    optimizer = nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param)
    flaxckpt.save(tmp_path / "ours", {"model": model, "optimizer": optimizer})
    pure = nnx.to_pure_dict(nnx.state({"model": model, "optimizer": optimizer}))
    pure["model"].pop("drop")
    with ocp.StandardCheckpointer() as orbax:
        orbax.save(tmp_path / "orbax", pure)
    for name in ("ours", "orbax"):
        export(tmp_path, name, f"{name} out", map=[names], config=CONFIG)
        assert_published(tmp_path / f"{name} out", arrays)
    (tmp_path / "state.msgpack").write_bytes(
        serialization.to_bytes({"model": jax.tree.map(np.asarray, pure["model"])})
    )
    export(tmp_path, "state.msgpack", map=[names], config=CONFIG)
    assert_published(tmp_path / "out", arrays)


def test_scanned_layers_are_unstacked(tmp_path, source):
    names = [*linen_map(), stack(r"params/layers_(\d+)/(.*)", r"params/layers/\2")]
    flaxckpt.save(tmp_path / "x", flaxckpt.load(source, transforms=names))
    assert flaxckpt.metadata(tmp_path / "x").leaves[
        "params/layers/up/kernel"
    ].shape == (3, 4, 6)
    export(tmp_path, map=names, tokenizer=source)
    assert_published(tmp_path / "out")


def test_splits_many_arrays_into_shards_with_index(tmp_path, source):
    flaxckpt.save(tmp_path / "x", {"params": loaded(source)})
    options = {"max_shard_bytes": 200, "max_concurrent_bytes": 64}
    export(tmp_path, config=CONFIG, **options)
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    count = len(set(index["weight_map"].values()))
    assert count > 1
    assert index["metadata"] == {
        "total_size": sum(array.nbytes for array in published().values())
    }
    for name, file in index["weight_map"].items():
        assert file.endswith(f"-of-{count:05}.safetensors")
        assert name in safetensors.load_file(tmp_path / "out" / file)
    assert_published(tmp_path / "out")
    assert flaxckpt.verify(tmp_path / "out").ok
    leaves = flaxckpt.load(tmp_path / "out", transforms=linen_map())
    jax.tree.map(np.testing.assert_array_equal, leaves["params"], loaded(source))


def test_dtype_casts_floats_and_updates_config(tmp_path, source):
    params = {"params": loaded(source), "ids": jnp.arange(3)}
    flaxckpt.save(tmp_path / "x", params)
    names = [*linen_map(), rename("position_ids", "ids")]
    config = CONFIG | {"torch_dtype": "float32", "text_config": {"dtype": "float16"}}
    options = {"map": names, "config": config}
    export(tmp_path, out="16", dtype=jnp.bfloat16, **options)
    wanted = published("bfloat16") | {"position_ids": np.arange(3, dtype=np.int32)}
    assert_published(tmp_path / "16", wanted)
    assert json.loads((tmp_path / "16/config.json").read_text()) == CONFIG | {
        "torch_dtype": "bfloat16",
        "text_config": {"dtype": "bfloat16"},
    }
    export(tmp_path, out="32", **options)
    assert json.loads((tmp_path / "32/config.json").read_text()) == config | {
        "text_config": {"dtype": "float32"}
    }


def test_leaves_dropped_or_cast_by_map_stay_so(tmp_path, source):
    names = [drop("norm/.*"), cast(".*", "bfloat16"), *linen_map()]
    del names[3]
    flaxckpt.save(tmp_path / "x", flaxckpt.load(source, transforms=names))
    export(tmp_path, map=names, config=CONFIG)
    wanted = published("bfloat16")
    del wanted["norm.weight"]
    assert_published(tmp_path / "out", wanted)


def test_keeps_dotted_names_with_empty_map(tmp_path):
    arrays = {"a.b": np.ones(2, np.float32), "a": np.zeros(3, np.float32)}
    safetensors.save_file(arrays, tmp_path / "x.safetensors")
    export(tmp_path, "x.safetensors", map=[], config=CONFIG)
    assert_published(tmp_path / "out", arrays)


class Config:
    def to_dict(self):
        return CONFIG


@pytest.mark.parametrize("kind", ["dict", "file", "directory", "object", "hub", "none"])
def test_accepts_config_from_any_source(tmp_path, source, caplog, kind):
    flaxckpt.save(tmp_path / "x", {"params": loaded(source)})
    files = {"config.json": source / "config.json"}
    config = {
        "dict": CONFIG,
        "file": str(source / "config.json"),
        "directory": source,
        "object": Config(),
        "hub": hub_cache.write_model(tmp_path, files),
        "none": None,
    }[kind]
    with caplog.at_level(logging.WARNING):
        export(tmp_path, config=config)
    if kind == "none":
        assert "cannot open the exported model" in caplog.text
        assert not (tmp_path / "out/config.json").exists()
    else:
        assert read_config(tmp_path / "out") == CONFIG | {"dtype": "float32"}


# ---- refusals ----------------------------------------------------------------------


def refuse(tmp_path, error=errors.OptionError, match="", **options):
    with pytest.raises(error, match=match) as caught:
        export(tmp_path, **{"config": CONFIG} | options)
    assert str(caught.value).count("\n") < 15
    assert not (tmp_path / "out").exists()


def test_rejects_unfit_map(tmp_path, source):
    flaxckpt.save(tmp_path / "x", {"params": loaded(source), "step": 1})
    refuse(tmp_path, match="matches no leaf", map=linen_map(prefix="model/"))
    refuse(tmp_path, match="no names for leaves in params", map=linen_map()[1:])
    refuse(tmp_path, match="has no leaf of the checkpoint", map=[cast(".*", "float32")])
    more = map_leaf("params/norm/scale", jnp.exp)
    refuse(tmp_path, match="cannot be inverted", map=[*linen_map(), more])
    refuse(tmp_path, match="it is a function", map=[lambda x: x])
    refuse(tmp_path, match="map must be a list", map=linen_map()[0])


def test_transforms_can_drop_leaf_missing_from_map(tmp_path, source, caplog):
    params = {**loaded(source), "new_head": jnp.ones(2)}
    flaxckpt.save(tmp_path / "x", {"params": params, "ema": {"w": jnp.ones(1)}})
    refuse(tmp_path, match="params/new_head: float32")
    with caplog.at_level(logging.INFO):
        export(tmp_path, config=CONFIG, transforms=[drop("params/new_head")])
    assert "not exported, as it is beside params: ema/w" in caplog.text
    assert_published(tmp_path / "out")


def test_rejects_invalid_configs(tmp_path, source):
    flaxckpt.save(tmp_path / "x", {"params": loaded(source)})
    (tmp_path / "list.json").write_text("[]")
    (tmp_path / "broken.json").write_text("{")
    for config, error, match in (
        (tmp_path / "missing", errors.CheckpointNotFoundError, r"no config\.json at"),
        (tmp_path, errors.CheckpointNotFoundError, r"no config\.json at"),
        (tmp_path / "list.json", errors.CheckpointFormatError, "not a JSON object"),
        (tmp_path / "broken.json", errors.CheckpointFormatError, "not a config"),
        (3, errors.OptionError, "must be a dict, the path"),
        ({"a": object()}, errors.OptionError, "cannot be written as JSON"),
        ({"quantization_config": {}}, errors.OptionError, "quantization_config"),
    ):
        refuse(tmp_path, error, match=match, config=config)
    refuse(tmp_path, match="no files to copy", tokenizer=tmp_path, config=CONFIG)
    refuse(tmp_path, match="not a directory", tokenizer=source / "config.json")


def test_does_not_copy_files_linked_from_elsewhere(tmp_path, source):
    flaxckpt.save(tmp_path / "x", {"params": loaded(source)})
    (tmp_path / "secret").write_text("{}")
    for name, option in (("tokenizer.json", "tokenizer"), ("config.json", "config")):
        (source / name).unlink()
        (source / name).symlink_to(tmp_path / "secret")
        refuse(
            tmp_path,
            errors.DamagedCheckpointError,
            match="outside of its directory",
            **{option: source},
        )


def test_pipe_in_place_of_file_does_not_block(tmp_path, source):
    flaxckpt.save(tmp_path / "x", {"params": loaded(source)})
    (source / "tokenizer.json").unlink()
    os.mkfifo(source / "tokenizer.json")
    refuse(tmp_path, errors.DamagedCheckpointError, "regular file", tokenizer=source)
    (source / "config.json").unlink()
    os.mkfifo(source / "config.json")
    refuse(tmp_path, errors.CheckpointNotFoundError, "no config", config=source)


def test_overwrite_requires_replacing_all_export_files(tmp_path, source):
    flaxckpt.save(tmp_path / "x", {"params": loaded(source)})
    export(tmp_path, tokenizer=source, max_shard_bytes=200)
    with pytest.raises(errors.CheckpointExistsError, match="overwrite=True"):
        export(tmp_path, tokenizer=source)
    with pytest.raises(errors.CheckpointExistsError, match=r"vocab\.txt"):
        export(tmp_path, config=source, overwrite=True)
    with pytest.raises(errors.CheckpointExistsError, match=r"config\.json"):
        flaxckpt.convert(tmp_path / "x", tmp_path / "out", overwrite=True)
    export(tmp_path, tokenizer=source, overwrite=True)
    assert_published(tmp_path / "out")
    assert len(list((tmp_path / "out").glob("*.safetensors*"))) == 1


def test_rejects_target_named_like_file(tmp_path, source):
    flaxckpt.save(tmp_path / "x", {"params": loaded(source)})
    with pytest.raises(errors.OptionError, match="has the name of a file"):
        export(tmp_path, out="m.safetensors", config=CONFIG)


# ---- maps by name ------------------------------------------------------------------


@pytest.mark.sampled(5)
@pytest.mark.parametrize("target", ["linen", "tunix", "maxtext", "maxtext-scanned"])
@pytest.mark.parametrize("root", ["params", "a/b", ""])
def test_detects_layout_and_prefix(tmp_path, target, root):
    model = hf.write_llama(tmp_path / "published")
    changes = maps.llama(model, target=target, prefix=root)
    flaxckpt.convert(model, tmp_path / "x", transforms=changes)
    export(tmp_path, map="auto", config=model, max_shard_bytes=10_000)
    found, wanted = read_all(tmp_path / "out"), hf.llama_tensors()
    assert found.keys() == wanted.keys()
    for name, array in wanted.items():
        # MaxText's queries are scaled, so the last bit may differ.
        np.testing.assert_allclose(
            found[name], array, rtol=3e-7 if "q_proj" in name else 0
        )


def test_exports_base_model_alone(tmp_path):
    model = hf.write_llama(tmp_path / "published", base_alone=True)
    changes = maps.llama(
        model, target="linen", prefix="params", source_base="", target_base=""
    )
    flaxckpt.convert(model, tmp_path / "x", transforms=changes)
    flaxckpt.export_huggingface(tmp_path / "x", tmp_path / "out", config=model)
    assert_published(tmp_path / "out", hf.llama_tensors(base_alone=True))


@pytest.mark.parametrize(
    "options", [{"map": "auto"}, {"map": "llama", "target": "linen"}]
)
def test_rejects_extra_leaf_but_exports_rest_after_drop(tmp_path, options):
    model = hf.write_llama(tmp_path / "published")
    params = flaxckpt.load(model, transforms=maps.llama(model, target="linen"))
    flaxckpt.save(tmp_path / "x", {"params": {**params, "value_head": np.ones((4, 1))}})
    refuse(tmp_path, match="params/value_head", config=model, **options)
    dropped = [drop("params/value_head")]
    export(tmp_path, config=model, transforms=dropped, **options)
    assert_published(tmp_path / "out", hf.llama_tensors())


@pytest.mark.parametrize("names", [("params", "ema_params"), ("average", "model")])
def test_ambiguous_parameter_copies_require_prefix(tmp_path, names):
    model = hf.write_llama(tmp_path / "published")
    params = flaxckpt.load(model, transforms=maps.llama(model, target="linen"))
    copies = (params, jax.tree.map(lambda x: x + 1, params))
    flaxckpt.save(tmp_path / "x", dict(zip(names, copies, strict=True)))
    why = "both have the leaves of maps.llama"
    refuse(tmp_path, match=why, map="auto", config=model)
    export(tmp_path, map="auto", config=model, prefix=names[0])
    assert_published(tmp_path / "out", hf.llama_tensors())


def test_map_name_requires_fitting_config(tmp_path):
    model = hf.write_llama(tmp_path / "published")
    changes = maps.llama(model, target="linen", prefix="params")
    flaxckpt.convert(model, tmp_path / "x", transforms=changes)
    refuse(tmp_path, match="needs the config", map="auto", config=None)
    refuse(tmp_path, match="'auto' or one of", map="lama", config=model)
    refuse(tmp_path, match="'mamba'", map="auto", config={"model_type": "mamba"})
    refuse(
        tmp_path, match="30 leaves are missing", map="auto", config=model, prefix="p"
    )
    refuse(tmp_path, match="no target 'x'", map="auto", config=model, target="x")
    refuse(tmp_path, match="name of a map", map=changes, target="linen")
    wrong = hf.LLAMA | {"num_hidden_layers": 4}
    refuse(
        tmp_path, match="leaves are missing", map="llama", config=wrong, target="linen"
    )
    config = {k: v for k, v in hf.LLAMA.items() if k != "model_type"}
    export(tmp_path, map="llama", config=config)
    assert_published(tmp_path / "out", hf.llama_tensors())


# ---- interrupted -------------------------------------------------------------------


@pytest.fixture
def computed(monkeypatch):
    """The names of the leaves that are computed."""
    names = []
    original = seams.current("blockwise.compute")

    def traced(leaves, max_bytes):
        names.extend(leaf.info.path for leaf in leaves)
        return original(leaves, max_bytes)

    seams.replace(monkeypatch, "blockwise.compute", traced)
    return names


def export_in_parts(tmp_path, **options):
    return export(tmp_path, **{"config": CONFIG, "max_concurrent_bytes": 64} | options)


def test_interrupted_export_keeps_computed_tensors(tmp_path, source, computed):
    flaxckpt.save(tmp_path / "x", {"params": loaded(source)})
    computed.clear()
    with stopping(1 / 2) as stop:
        export_in_parts(tmp_path, progress=stop)
    first = list(computed)
    computed.clear()
    assert first
    export_in_parts(tmp_path)  # the map is made anew, with other function objects
    assert_published(tmp_path / "out")
    kept = set(first[:-1])  # the last was not written
    assert kept
    assert kept.isdisjoint(computed)
    assert {*first, *computed} == {
        "lm_head/weight",
        *(f"layers/{i}/up/weight" for i in range(3)),
    }


def times(factor):
    return map_leaf(
        "params/.*/kernel", lambda x: x * factor, inverse=lambda x: x / factor
    )


def test_another_function_starts_over(tmp_path, source, computed):
    flaxckpt.save(tmp_path / "x", {"params": loaded(source)})
    with stopping(1 / 2) as stop:
        export_in_parts(tmp_path, map=[*linen_map(), times(2.0)], progress=stop)
    export_in_parts(tmp_path, map=[*linen_map(), times(4.0)])
    wanted = {
        name: array / 4 if array.ndim == 2 and "embed" not in name else array
        for name, array in published().items()
    }
    assert_published(tmp_path / "out", wanted)


def test_another_config_starts_over(tmp_path, source):
    flaxckpt.save(tmp_path / "x", {"params": loaded(source)})
    with stopping(1 / 2) as stop:
        export_in_parts(tmp_path, progress=stop)
    export_in_parts(tmp_path, config=CONFIG | {"other": "x" * 1000})
    assert_published(tmp_path / "out")
    assert "xxx" in (tmp_path / "out/config.json").read_text()
