"""`export_peft`: files, factors, and adapters that PEFT does not have."""

import json

import numpy as np
import pytest
import safetensors.numpy
from flax import nnx

import flaxckpt
from flaxckpt import errors
from flaxckpt.transforms import remap, rename, scale

LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 3,
    "hidden_size": 24,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
}
RNG = np.random.default_rng(0)


def array(*shape):
    return RNG.normal(size=shape).astype(np.float32)


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


class Mlp(nnx.Module):
    """A kernel with an adapter of Flax, and one around a layer."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.up = nnx.LoRALinear(4, 6, lora_rank=2, rngs=rngs)
        self.down = nnx.LoRA(
            6, 3, 4, base_module=nnx.Linear(6, 4, rngs=rngs), rngs=rngs
        )


@pytest.mark.parametrize("is_lora_only", [True, False])
def test_nnx_adapters_have_peft_names_and_axes(tmp_path, is_lora_only):
    model = Mlp()
    kinds = nnx.LoRAParam if is_lora_only else nnx.Param
    flaxckpt.save(tmp_path / "run", nnx.state(model, kinds))
    down = "down/base_module" if not is_lora_only else "down"
    rows = [
        ("mlp/up_proj/weight", "up/kernel", "o e -> e o"),
        ("mlp/down_proj/weight", f"{down}/kernel", "o e -> e o"),
    ]
    flaxckpt.export_peft(tmp_path / "run", tmp_path / "adapter", map=[remap(rows)])
    found = safetensors.numpy.load_file(tmp_path / "adapter/adapter_model.safetensors")
    wanted = {
        "up_proj.lora_A": model.up.lora.lora_a,
        "up_proj.lora_B": model.up.lora.lora_b,
        "down_proj.lora_A": model.down.lora_a,
        "down_proj.lora_B": model.down.lora_b,
    }
    assert found.keys() == {f"base_model.model.mlp.{name}.weight" for name in wanted}
    for name, leaf in wanted.items():
        np.testing.assert_array_equal(
            found[f"base_model.model.mlp.{name}.weight"], np.asarray(leaf[...]).T
        )
    config = json.loads((tmp_path / "adapter/adapter_config.json").read_text())
    # The factor of both is 1: alpha is the rank.
    ranks = {"^mlp\\.up_proj": 2}
    assert (config["r"], config["lora_alpha"]) == (3, 3)
    assert config["rank_pattern"] == config["alpha_pattern"] == ranks
    assert config["target_modules"] == ["mlp.down_proj", "mlp.up_proj"]


def test_export_casts_to_dtype_and_overwrites(tmp_path):
    flaxckpt.save(tmp_path / "run", linen_adapters("lora_a", "lora_b"))
    options = {"alpha": 3, "config": LLAMA}
    for dtype in (None, "bfloat16"):
        flaxckpt.export_peft(
            tmp_path / "run",
            tmp_path / "adapter",
            dtype=dtype,
            overwrite=dtype is not None,
            **options,
        )
    infos = flaxckpt.metadata(tmp_path / "adapter").leaves.values()
    assert {info.dtype for info in infos} == {"bfloat16"}
    names = {path.name for path in (tmp_path / "adapter").iterdir()}
    assert names == {"adapter_model.safetensors", "adapter_config.json"}
    with pytest.raises(errors.CheckpointExistsError):
        flaxckpt.export_peft(tmp_path / "run", tmp_path / "adapter", **options)


# ---- what PEFT does not have --------------------------------------------------------


def export(tmp_path, state, **options):
    flaxckpt.save(tmp_path / "run", state)
    options = {"alpha": 2, "config": LLAMA, **options}
    return flaxckpt.export_peft(tmp_path / "run", tmp_path / "adapter", **options)


QUERY = "model/layers/{i}/self_attn/q_proj/weight"
Q = {"q": {"w_lora_a": np.ones((24, 2), np.float32),
           "w_lora_b": np.ones((2, 24), np.float32)}}  # fmt: skip


@pytest.mark.parametrize(
    ("state", "options", "message"),
    [
        ({"w": np.ones(3)}, {}, "wanted adapters, found none"),
        ({"a": {"w_lora_a": np.ones((2, 2))}}, {}, "the other leaf of the pair"),
        (
            {"a": {**Q["q"], "w_lora_magnitude": np.ones(3)}},
            {},
            "a/w_lora_magnitude: is of another kind of update",
        ),
        (Q, {}, "no layout of maps.llama has the kernels of all 1 adapters"),
        (Q, {"map": [remap([(QUERY, "k_{i}/w")])]}, "the map has no row for q/w"),
        (
            {"q_0": Q["q"]},
            {"map": [remap([(QUERY, "q_{i}/w")])], "alpha": None},
            "its update has a factor: pass alpha=",
        ),
        (
            {"q_0": Q["q"]},
            {"map": [remap([(QUERY, "q_{i}/w")]), scale("q_.*", 0.5)]},
            r"scale\('q_.\*', 0.5\) changes the values of q_0/w",
        ),
        (Q, {"map": [rename("a", "b")]}, "the map must be one remap"),
        (
            Q,
            {"map": [remap([(QUERY, "q/w", "i o e -> e i o")])]},
            "are stacked: take the layers apart first",
        ),
        (
            Q,
            {"map": [remap([("h/qkv/weight", "{c:q|k}/w", "(c o) e -> c e o")])]},
            "it is for a part of h/qkv/weight alone",
        ),
        (
            Q,
            {"map": [remap([("q/weight", "q/w", "(two p) e -> e (p two)")], two=2)]},
            "reorders values",
        ),
        (
            Q,
            {"map": [remap([("model/embed_tokens/weight", "q/w")])]},
            "is not that of a linear layer",
        ),
        (
            {"q": {**Q["q"], "w": np.ones((24, 25), np.float32)}},
            {"map": [remap([("q/weight", "q/w")])]},
            "does not have the size of q/w",
        ),
        (
            {"q": {**Q["q"], "w_lora_b": np.ones((3, 24), np.float32)}},
            {"map": [remap([("q/weight", "q/w")])]},
            "are not two matrices of one rank",
        ),
        (
            {"q": {**Q["q"], "w_lora_b": np.ones((2, 24), np.int8)}},
            {"map": [remap([("q/weight", "q/w")])]},
            "wanted floats",
        ),
        (Q, {"config": None}, "needs the config of the model"),
        (Q, {"map": [remap([("q/weight", "q/w")])], "target": "linen"}, "not a list"),
        (Q, {"alpha": float("inf")}, "alpha must be finite"),
        (Q, {"settings": {"use_dora": True}}, "use_dora=True: PEFT would compute"),
        (Q, {"settings": {"use_rslora": True}}, "use_rslora: follows from"),
        (Q, {"settings": {"r": 3}}, "r: follows from the adapters"),
        (Q, {"settings": {"init_lora_weights": "pissa"}}, "pissa"),
        (Q, {"settings": {"bias": "all"}}, "bias='all'"),
        (Q, {"settings": {"x": object()}}, "cannot be written as JSON"),
    ],
)
def test_export_rejects_features_missing_in_peft(tmp_path, state, options, message):
    with pytest.raises(errors.OptionError, match=message):
        export(tmp_path, state, **options)
    assert not (tmp_path / "adapter").exists()
