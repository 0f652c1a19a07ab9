"""`export_peft`: PEFT opens adapters trained with JAX, and computes equal logits."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import flaxckpt
from flaxckpt.transforms import merge_lora, remap

torch = pytest.importorskip("torch", reason="needs torch")
transformers = pytest.importorskip("transformers", reason="needs transformers")
peft = pytest.importorskip("peft", reason="needs peft")
pytest.importorskip(
    "transformers.modeling_flax_utils",
    reason="this release of transformers has no Flax classes",
)
from tests.maps import decoders  # noqa: E402
from tests.maps.test_peft import llama  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

RNG = np.random.default_rng(0)


def array(*shape):
    return (RNG.normal(size=shape) * 0.3).astype(np.float32)


def logits_of(model):
    with torch.no_grad():
        return decoders.reference(model)


# ---- Tunix and Qwix -----------------------------------------------------------------

TUNIX = {
    case.id: case
    for case in decoders.CASES
    if case.target == "tunix" and "moe" not in case.id
}


@pytest.mark.parametrize(
    ("id", "is_lora_only"),
    [
        ("llama-tunix", True),
        ("llama-tunix", False),
        ("qwen3-tunix", True),
        ("gemma2-tunix", True),  # keys and values in one array
        ("gemma3-tunix-same-heads", True),  # queries, too
    ],
)
def test_peft_logits_match_tunix(tmp_path, id, is_lora_only):
    qwix = pytest.importorskip("qwix", reason="needs qwix")
    case = TUNIX[id]
    torch.manual_seed(0)
    model = case.published().eval()
    model.save_pretrained(tmp_path / "base")
    config = model.config
    state = case.state(config)
    plain = flaxckpt.load(
        tmp_path / "base",
        state,
        transforms=flaxckpt.maps.find(tmp_path / "base", state),
    )
    length = decoders.IDS.shape[1]
    inputs = (
        jnp.asarray(decoders.IDS),
        jnp.broadcast_to(jnp.arange(length), decoders.IDS.shape),
        None,
        jnp.broadcast_to(
            jnp.tri(length, dtype=bool), (len(decoders.IDS), length, length)
        ),
    )
    provider = qwix.LoraProvider(module_path=".*(attn|mlp).*", rank=3, alpha=6.0)
    adapted = qwix.apply_lora_to_model(plain, provider, *inputs, rngs=nnx.Rngs(2))
    graph, lora, rest = nnx.split(adapted, nnx.LoRAParam, ...)
    lora = jax.tree.map(lambda leaf: jnp.asarray(array(*leaf.shape) / 3), lora)
    adapted = nnx.merge(graph, lora, rest)
    before = logits_of(model)
    with jax.default_matmul_precision("highest"):
        wanted = case.run(adapted, config)
    assert np.abs(wanted - before).max() > 1e-2

    saved = lora if is_lora_only else nnx.state(adapted, nnx.Param)
    flaxckpt.save(tmp_path / "run", {"params": saved, "step": 3})
    flaxckpt.export_peft(
        tmp_path / "run", tmp_path / "adapter", alpha=6.0, config=tmp_path / "base"
    )
    opened = peft.PeftModel.from_pretrained(model, tmp_path / "adapter").eval()
    np.testing.assert_allclose(logits_of(opened), wanted, rtol=1e-5, atol=1e-5)
    names = [name for name, _ in opened.named_parameters() if ".lora_" in name]
    kernels = 7 * config.num_hidden_layers
    assert len(names) == 2 * kernels


# ---- other layouts ------------------------------------------------------------------


def linen_adapters(name_a, name_b, ranks=(3, 3, 3)):
    """Adapters beside the kernels of the Flax classes of transformers."""
    return {
        "model": {
            "layers": {
                str(i): {
                    "self_attn": {
                        "q_proj": {name_a: array(24, r), name_b: array(r, 24)}
                    },
                    "mlp": {"down_proj": {name_a: array(32, r), name_b: array(r, 24)}},
                }
                for i, r in enumerate(ranks)
            }
        }
    }


def test_custom_rows_match_logits_of_merged_model(tmp_path):
    model = llama().eval()
    model.save_pretrained(tmp_path / "base")
    own = [
        remap(
            [
                (
                    "model/layers/{i}/self_attn/q_proj/weight",
                    "params/block_{i}/query/kernel",
                    "(h d) e -> e h d",
                ),
                (
                    "model/layers/{i}/mlp/down_proj/weight",
                    "params/block_{i}/down/kernel",
                    "o e -> e o",
                ),
            ],
            h=4,
        )
    ]
    state = flaxckpt.load(tmp_path / "base", transforms=own)
    for i, rank in enumerate((3, 2, 3)):
        block = state["params"][f"block_{i}"]
        block["query"] |= {
            "kernel_lora_a": array(24, rank),
            "kernel_lora_b": array(rank, 4, 6),
        }
        block["down"] |= {
            "kernel_lora_a": array(32, rank),
            "kernel_lora_b": array(rank, 24),
        }
    flaxckpt.save(tmp_path / "run", state)
    flaxckpt.export_peft(
        tmp_path / "run",
        tmp_path / "adapter",
        map=own,
        alpha=5,
        base_model="org/base",
        settings={"task_type": "CAUSAL_LM"},
    )
    config = json.loads((tmp_path / "adapter/adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (3, 5)
    assert {*config["rank_pattern"].values()} == {2}
    assert config["base_model_name_or_path"] == "org/base"
    assert config["task_type"] == "CAUSAL_LM"
    assert len(config["target_modules"]) == 6

    # The other way round: merged in Flax, then back to torch.
    flaxckpt.convert(
        tmp_path / "run",
        tmp_path / "merged",
        transforms=[merge_lora(alpha=5), *flaxckpt.transforms.inverse(own)],
    )
    merged = flaxckpt.load(tmp_path / "merged")
    plain = llama().eval()
    tensors = {
        jax.tree_util.keystr(path, simple=True, separator="."): torch.tensor(
            np.asarray(leaf)
        )
        for path, leaf in jax.tree_util.tree_leaves_with_path(merged)
    }
    plain.load_state_dict(tensors)
    opened = peft.PeftModel.from_pretrained(model, tmp_path / "adapter").eval()
    np.testing.assert_allclose(
        logits_of(opened), logits_of(plain.eval()), rtol=1e-5, atol=1e-5
    )
    assert np.abs(logits_of(opened) - logits_of(llama().eval())).max() > 1e-3


def test_nnx_adapters_have_factor_1(tmp_path):
    state = linen_adapters("lora_a", "lora_b", ranks=(3, 2, 3))
    flaxckpt.save(tmp_path / "run", {"params": state})
    model = llama().eval()
    flaxckpt.export_peft(tmp_path / "run", tmp_path / "adapter", config=model.config)
    opened = peft.PeftModel.from_pretrained(model, tmp_path / "adapter")
    merged = opened.merge_and_unload().state_dict()
    before = llama().eval().state_dict()
    for i in range(3):
        for part, name in (("self_attn", "q_proj"), ("mlp", "down_proj")):
            leaves = state["model"]["layers"][str(i)][part][name]
            kernel = f"model.layers.{i}.{part}.{name}.weight"
            wanted = before[kernel].numpy() + (leaves["lora_a"] @ leaves["lora_b"]).T
            np.testing.assert_allclose(
                merged.pop(kernel).numpy(), wanted, rtol=1e-5, atol=1e-6
            )
    assert all(torch.equal(value, before[name]) for name, value in merged.items())
