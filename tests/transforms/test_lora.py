"""Low-rank updates merged into the weights that they adapt."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import flaxckpt
from flaxckpt import errors, transforms
from flaxckpt.transforms import merge, merge_lora, rename
from tests.transforms.states import table_of, transformed

# ---- Flax ---------------------------------------------------------------------------


class Model(nnx.Module):
    """A layer with its adapter inside, a layer with its adapter around, a plain one."""

    def __init__(self, rngs):
        self.inside = nnx.LoRALinear(4, 4, lora_rank=2, rngs=rngs)
        linear = nnx.Linear(4, 6, rngs=rngs)
        self.around = nnx.LoRA(4, 2, 6, base_module=linear, rngs=rngs)
        self.head = nnx.Linear(6, 3, rngs=rngs)

    def __call__(self, x):
        return self.head(self.around(nnx.gelu(self.inside(x))))


class Merged(nnx.Module):
    """The same model without adapters."""

    def __init__(self, rngs):
        self.inside = nnx.Linear(4, 4, rngs=rngs)
        self.around = nnx.Linear(4, 6, rngs=rngs)
        self.head = nnx.Linear(6, 3, rngs=rngs)

    __call__ = Model.__call__


def randomized(model, seed=0):
    """The model with random values; the parts of new adapters are zero."""
    graph, state = nnx.split(model)
    leaves, treedef = jax.tree.flatten(state)
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    new = [jax.random.normal(k, x.shape) for k, x in zip(keys, leaves, strict=True)]
    return nnx.merge(graph, treedef.unflatten(new))


def test_merges_nnx_adapters(tmp_path):
    model = randomized(Model(nnx.Rngs(0)))
    tx = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.LoRAParam)
    flaxckpt.save(tmp_path / "c", {"model": model, "optimizer": tx})
    changes = [
        merge_lora(),
        rename("(.*)/base_module/(.*)", r"\1/\2"),
        transforms.drop("optimizer/.*"),
    ]
    merged = flaxckpt.load(
        tmp_path / "c", {"model": Merged(nnx.Rngs(1))}, transforms=changes
    )["model"]
    x = jax.random.normal(jax.random.key(7), (5, 4))
    np.testing.assert_allclose(model(x), merged(x), rtol=1e-5, atol=1e-5)
    without = table_of({"model": model})
    assert (
        np.abs(without["model/inside/kernel"] - merged.inside.kernel[...]).max() > 0.1
    )


def test_drops_moments_of_adapters_and_keeps_moments_of_weights():
    model = randomized(Model(nnx.Rngs(0)))
    tx = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
    state = {"model": model, "optimizer": tx}
    before, after = table_of(state), transformed([merge_lora()], state)
    assert not [path for path in after if "lora" in path]
    kept = {path for path in before if "lora" not in path}
    assert after.keys() == kept
    changed = {p for p in kept if not np.array_equal(before[p], after[p])}
    assert changed == {"model/inside/kernel", "model/around/base_module/kernel"}


class Own(nnx.Module):
    """A layer of its own class, with its adapter under another name."""

    def __init__(self, rngs):
        self.kernel = nnx.Param(jnp.ones((4, 3)))
        self.update = nnx.LoRA(4, 2, 3, rngs=rngs)


def a_root_lora_linear(rngs):
    return nnx.LoRALinear(4, 3, lora_rank=2, rngs=rngs)


def a_root_lora(rngs):
    return nnx.LoRA(4, 2, 3, base_module=nnx.Linear(4, 3, rngs=rngs), rngs=rngs)


def beside_another_kernel(rngs):
    inner = nnx.LoRALinear(4, 3, lora_rank=2, rngs=rngs)
    return nnx.Dict({"kernel": nnx.Param(jnp.ones((1,))), "layer": inner})


@pytest.mark.parametrize(
    "make", [a_root_lora_linear, a_root_lora, Own, beside_another_kernel]
)
def test_finds_weight_of_nnx_adapter_by_structure(make):
    model = randomized(make(nnx.Rngs(0)))
    before, after = table_of(model), transformed([merge_lora()], model)
    assert after.keys() == {path for path in before if "lora_" not in path}
    [a], [b] = (
        [leaf for path, leaf in before.items() if path.endswith(name)]
        for name in ("lora_a", "lora_b")
    )
    [changed] = [p for p in after if not np.array_equal(before[p], after[p])]
    np.testing.assert_allclose(before[changed] + a @ b, after[changed], rtol=1e-5)


def test_does_not_merge_adapter_into_weight_around_its_module(tmp_path):
    """The adapted module has no kernel itself, and the module around has one."""

    class Around(nnx.Module):
        def __init__(self, rngs):
            self.kernel = nnx.Param(jnp.zeros((2, 2)))
            layers = nnx.Sequential(nnx.Linear(2, 2, rngs=rngs))
            self.head = nnx.LoRA(2, 2, 2, base_module=layers, rngs=rngs)

    model = randomized(Around(nnx.Rngs(0)))
    wanted = "head/lora_a: no weight head/kernel or head/base_module/kernel"
    with pytest.raises(errors.OptionError, match=wanted):
        transformed([merge_lora()], model)
    flaxckpt.save(tmp_path / "c", model)
    change = transforms.remap([("weight", "kernel", "o e -> e o")])
    with pytest.raises(errors.OptionError, match="has no row for head/kernel"):
        flaxckpt.export_peft(tmp_path / "c", tmp_path / "out", map=[change], alpha=4)


QWIX = [  # shapes of a kernel and of its two parts, and the product
    ((4, 5), (4, 2), (2, 5), "ar,rb->ab"),
    ((4, 4), (4, 2), (2, 4), "ar,rb->ab"),
    ((6, 2, 3), (6, 2), (2, 2, 3), "ar,rbc->abc"),
    ((4, 6, 3), (6, 2), (2, 4, 3), "br,rac->abc"),
    ((2, 4, 6, 3), (6, 2), (2, 2, 4, 3), "cr,rabd->abcd"),
    ((4, 3, 6), (4, 3, 2), (2, 6), "abr,rc->abc"),
    ((6, 2, 3), (6, 5), (5, 6), "ar,rb->ab"),
    ((4, 3, 6), (12, 5), (5, 6), "ar,rb->ab"),
    ((3, 4, 6), (3, 4, 2), (3, 2, 6), "xar,xrb->xab"),
    ((3, 4, 4), (3, 4, 2), (3, 2, 4), "xar,xrb->xab"),
    ((3, 3, 4, 6), (3, 3, 4, 2), (2, 6), "abcr,rd->abcd"),
]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("shape", "a", "b", "product"), QWIX)
def test_merges_qwix_adapters_of_any_layout(shape, a, b, product):
    state = {
        "q": {
            "w": np.random.default_rng(0).normal(size=shape).astype(np.float32),
            "w_lora_a": np.random.default_rng(1).normal(size=a).astype(np.float32),
            "w_lora_b": np.random.default_rng(2).normal(size=b).astype(np.float32),
        }
    }
    found = transformed([merge_lora(alpha=6)], state)
    assert list(found) == ["q/w"]
    delta = np.einsum(product, state["q"]["w_lora_a"], state["q"]["w_lora_b"])
    wanted = state["q"]["w"] + 6 / a[-1] * delta.reshape(shape)
    np.testing.assert_allclose(wanted, found["q/w"], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("shape", "a", "b", "why"),
    [
        ((4, 5), (4, 2), (2, 4), "in no way"),
        ((4, 4, 3), (4, 2), (2, 4, 3), "in several ways"),
        ((4, 5), (4, 2), (3, 5), "in no way"),
    ],
)
def test_rejects_misfit_adapters(shape, a, b, why):
    state = {"w": np.ones(shape), "w_lora_a": np.ones(a), "w_lora_b": np.ones(b)}
    with pytest.raises(errors.OptionError, match=why) as caught:
        transformed([merge_lora(alpha=1)], state)
    assert "w_lora_a" in str(caught.value)


def test_merge_lora_names_missing_parts():
    ones = np.ones((2, 2), np.float32)
    for state, change, why in (
        ({"w": ones}, merge_lora(), "found no adapters"),
        ({"w": ones, "w_lora_a": ones}, merge_lora(alpha=1), "w_lora_a: the other"),
        (
            {"layer": {"lora_a": ones, "lora_b": ones}},
            merge_lora(),
            "no weight layer/kernel or layer/base_module/kernel",
        ),
        ({"w": ones, "w_lora_a": ones, "w_lora_b": ones}, merge_lora(), "pass alpha="),
        (
            {"w": ones, "w_lora_a": ones, "w_lora_b": ones},
            merge_lora(alpha=1, rank=3),
            r"wanted the rank 3.*has the rank 2",
        ),
        (
            {"w": ones.astype(np.int8), "w_lora_a": ones, "w_lora_b": ones},
            merge_lora(alpha=1),
            "dequantize",
        ),
    ):
        with pytest.raises(errors.OptionError, match=why):
            transformed([change], state)


def test_merge_lora_has_no_inverse():
    with pytest.raises(errors.OptionError, match="cannot be inverted"):
        transforms.inverse([merge_lora(alpha=1)])
    assert str(merge_lora(alpha=2, rank=3)) == "merge_lora(alpha=2, rank=3)"


# ---- the files of PEFT --------------------------------------------------------------


def base_and_adapter(tmp_path, dtype="float32", **config):
    """Writes a model and an adapter as PEFT does; returns their values."""
    rng = np.random.default_rng(0)

    def array(*shape):
        return rng.normal(size=shape).astype(np.float32)

    base = {"weight": array(6, 4), "bias": array(6)}
    a, b = array(2, 4), array(6, 2)
    settings = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, **config}
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter/adapter_config.json").write_text(json.dumps(settings))
    cast = {k: jnp.asarray(v, dtype) for k, v in base.items()}
    flaxckpt.save(tmp_path / "b", {"model": {"q": cast}})
    parts = {"lora_A": {"weight": a}, "lora_B": {"weight": b}}
    wrapped = {"base_model": {"model": {"model": {"q": parts}}}}
    flaxckpt.save(tmp_path / "a", wrapped)
    flaxckpt.convert(tmp_path / "b", tmp_path / "base.safetensors")
    flaxckpt.convert(tmp_path / "a", tmp_path / "adapter/adapter_model.safetensors")
    return cast, a, b


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_reads_all_numbers_from_adapter_directory(tmp_path, dtype):
    base, a, b = base_and_adapter(tmp_path, dtype, use_rslora=True)
    changes = [merge_lora(tmp_path / "adapter")]
    found = flaxckpt.load(tmp_path / "base.safetensors", transforms=changes)["model"]
    delta = np.float32(4 / np.sqrt(2)) * (b @ a)
    wanted = (base["weight"].astype(np.float32) + delta).astype(dtype)
    tolerance = 1e-6 if dtype == "float32" else 1e-2
    found_weight = np.asarray(found["q"]["weight"], np.float32)
    assert found["q"]["weight"].dtype == dtype
    np.testing.assert_allclose(
        np.asarray(wanted, np.float32), found_weight, rtol=tolerance
    )
    np.testing.assert_array_equal(base["bias"], found["q"]["bias"])


def test_merges_adapter_given_as_leaves(tmp_path):
    base_and_adapter(tmp_path)
    apart = [merge(tmp_path / "adapter"), merge_lora(alpha=4)]
    at_once = [merge_lora(tmp_path / "adapter")]
    one, other = (
        flaxckpt.load(tmp_path / "base.safetensors", transforms=changes)
        for changes in (apart, at_once)
    )
    jax.tree.map(np.testing.assert_array_equal, one, other)


def test_merges_adapter_in_hub_cache(tmp_path):
    """The cache has symlinks from `snapshots/<commit>/` into `blobs/`."""
    base_and_adapter(tmp_path)
    plain = flaxckpt.load(
        tmp_path / "base.safetensors", transforms=[merge_lora(tmp_path / "adapter")]
    )
    snapshot = tmp_path / "models--a--b/snapshots/0123"
    blobs = tmp_path / "models--a--b/blobs"
    snapshot.mkdir(parents=True)
    (tmp_path / "adapter").rename(blobs)
    for file in blobs.iterdir():
        (snapshot / file.name).symlink_to(f"../../blobs/{file.name}")
    cached = flaxckpt.load(
        tmp_path / "base.safetensors", transforms=[merge_lora(snapshot)]
    )
    jax.tree.map(np.testing.assert_array_equal, plain, cached)


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"use_dora": True}, "use_dora"),
        ({"init_lora_weights": "pissa_niter_4"}, "changes the base weights"),
        ({"init_lora_weights": "olora"}, "changes the base weights"),
        ({"peft_type": "LOHA"}, "'LOHA'"),
        ({"lora_alpha": "4"}, "wanted numbers for lora_alpha"),
        ({"lora_alpha": None}, "wanted numbers for lora_alpha"),
        ({"rank_pattern": [2]}, "wanted numbers for r and rank_pattern"),
        ({"rank_pattern": {"q": 3}}, "wanted the rank 3"),
        ({"alpha_pattern": {"(": 3}}, "not a valid regular expression"),
        ({"alpha_pattern": {r"(q)\1": 3}}, "cannot be used"),
        ({"rank_pattern": {r"(.+)+([^x]|\w+)+q*": 3}}, "wanted the rank 3"),
        ({"r": 5}, "wanted the rank 5"),
        ({"fan_in_fan_out": True}, "its product has the shape"),
    ],
)
def test_rejects_unsupported_adapter_configs(tmp_path, config, why):
    base_and_adapter(tmp_path, **config)
    with pytest.raises(errors.OptionError, match=why):
        flaxckpt.load(
            tmp_path / "base.safetensors", transforms=[merge_lora(tmp_path / "adapter")]
        )


def test_error_names_missing_or_damaged_config(tmp_path):
    base_and_adapter(tmp_path)
    config = tmp_path / "adapter/adapter_config.json"
    for content in (b"{", b"[" * 100_000, b'{"r": 1, "r": 2}', b" " * 2**21, None):
        if content is None:
            config.unlink()
        else:
            config.write_bytes(content)
        with pytest.raises(errors.CheckpointFormatError, match=r"adapter_config\.json"):
            flaxckpt.load(
                tmp_path / "base.safetensors",
                transforms=[merge_lora(tmp_path / "adapter")],
            )
