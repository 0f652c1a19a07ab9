"""Adapters of Qwix, which trains Tunix's models with LoRA."""

import jax
import numpy as np
import pytest
from flax import nnx

import flaxckpt
from flaxckpt.transforms import merge_lora

qwix = pytest.importorskip("qwix", reason="needs qwix")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


class Attention(nnx.Module):
    """Kernels of all the layouts that Tunix's models have."""

    def __init__(self, rngs):
        self.q = nnx.Einsum("BTD,NDH->BTNH", (2, 12, 5), rngs=rngs)
        self.kv = nnx.Einsum("BSD,CKDH->CBSKH", (2, 3, 12, 5), rngs=rngs)
        self.out = nnx.Einsum("BTNH,NHD->BTD", (2, 5, 12), rngs=rngs)
        self.square = nnx.Linear(12, 12, rngs=rngs)
        self.general = nnx.LinearGeneral(12, (2, 7), rngs=rngs)

    def __call__(self, x):
        q, kv = self.q(x), self.kv(x)
        y = self.out(nnx.gelu(q + kv.sum((0, 3))[:, :, None]))
        return self.general(nnx.gelu(self.square(y)))


@pytest.mark.parametrize("rank", [3, 5])
def test_merged_adapters_give_equal_outputs(tmp_path, rank):
    x = jax.random.normal(jax.random.key(1), (2, 4, 12))
    plain = Attention(nnx.Rngs(0))
    provider = qwix.LoraProvider(module_path=".*", rank=rank, alpha=7.0)
    adapted = qwix.apply_lora_to_model(plain, provider, x, rngs=nnx.Rngs(2))
    graph, params, rest = nnx.split(adapted, nnx.Param, ...)
    leaves, treedef = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(3), len(leaves))
    new = [
        jax.random.normal(key, leaf.shape) * 0.5
        for key, leaf in zip(keys, leaves, strict=True)
    ]
    adapted = nnx.merge(graph, treedef.unflatten(new), rest)
    flaxckpt.save(tmp_path / "c", nnx.state(adapted, nnx.Param))

    wanted = nnx.state(plain, nnx.Param)
    changes = [merge_lora(alpha=7.0, rank=rank)]
    merged = flaxckpt.load(tmp_path / "c", wanted, transforms=changes)
    nnx.update(plain, merged)
    np.testing.assert_allclose(adapted(x), plain(x), rtol=1e-4, atol=1e-4)
    plan = flaxckpt.plan(tmp_path / "c", wanted, transforms=changes)
    assert plan.count("transformed") == 5
