"""Adapters of PEFT, merged as PEFT merges them, and adapters that PEFT opens."""

import json

import jax
import numpy as np
import pytest

import flaxckpt
from flaxckpt.transforms import keep, merge_lora, remap

torch = pytest.importorskip("torch", reason="needs torch")
transformers = pytest.importorskip("transformers", reason="needs transformers")
peft = pytest.importorskip("peft", reason="needs peft")

TOKENS = [[1, 5, 130, 7, 2]]


def llama():
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=24,
        intermediate_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=6,
        vocab_size=131,
        max_position_embeddings=64,
        tie_word_embeddings=False,
    )
    return transformers.LlamaForCausalLM(config)


def gpt2():
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_embd=24, n_layer=3, n_head=4, vocab_size=131, n_positions=64
    )
    return transformers.GPT2LMHeadModel(config)


def values(directory, transforms=()):
    """Returns name -> array of a directory of safetensors files."""
    found = flaxckpt.load(directory, transforms=transforms)
    leaves = jax.tree_util.tree_leaves_with_path(found)
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): np.asarray(leaf)
        for path, leaf in leaves
    }


CASES = {
    "attention": (llama, {"target_modules": ["q_proj", "v_proj"]}),
    "rank-stabilized": (llama, {"target_modules": ["q_proj"], "use_rslora": True}),
    "patterns": (
        llama,
        {
            "target_modules": ["q_proj", "down_proj"],
            "rank_pattern": {"down_proj": 2, r"model.layers.1.self_attn.q_proj": 4},
            "alpha_pattern": {r"layers.[01].mlp.down_proj": 7},
        },
    ),
    "head trained whole": (
        llama,
        {"target_modules": ["k_proj"], "modules_to_save": ["lm_head"]},
    ),
    "embedding": (llama, {"target_modules": ["embed_tokens", "o_proj"]}),
    "kernels with the input axis first": (
        gpt2,
        {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True},
    ),
    "biases": (
        gpt2,
        {"target_modules": ["c_attn"], "fan_in_fan_out": True, "bias": "lora_only"},
    ),
}


@pytest.mark.filterwarnings("ignore:Setting .save_embedding_layers")
@pytest.mark.parametrize("case", CASES)
def test_merges_adapters_like_peft(tmp_path, case):
    make, settings = CASES[case]
    model = make()
    model.save_pretrained(tmp_path / "base")
    config = peft.LoraConfig(r=3, lora_alpha=5, init_lora_weights=False, **settings)
    adapted = peft.get_peft_model(model, config)
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    adapted.save_pretrained(tmp_path / "adapter")
    adapted.merge_and_unload().save_pretrained(tmp_path / "merged")
    before = values(tmp_path / "base")
    wanted = values(tmp_path / "merged")
    found = values(tmp_path / "base", [merge_lora(tmp_path / "adapter")])
    assert found.keys() == wanted.keys() == before.keys()
    assert any(not np.array_equal(before[name], found[name]) for name in found)
    for name, value in wanted.items():
        np.testing.assert_allclose(
            value, found[name], rtol=1e-5, atol=1e-6, err_msg=name
        )


def test_peft_opens_adapters_trained_with_flax(tmp_path):
    """The adapters have the layout of Qwix in a Llama of Tunix."""
    model = llama().eval()
    model.save_pretrained(tmp_path / "base")
    rng = np.random.default_rng(0)

    def array(*shape):
        return rng.normal(size=shape).astype(np.float32) * 0.3

    layers = {
        str(i): {
            "attn": {"q_proj": {"w_lora_a": array(24, 3), "w_lora_b": array(3, 4, 6)}},
            "mlp": {
                "down_proj": {
                    "kernel_lora_a": array(32, 3),
                    "kernel_lora_b": array(3, 24),
                }
            },
        }
        for i in range(3)
    }
    flaxckpt.save(tmp_path / "run", {"layers": layers, "step": 3})
    peft_names = "base_model/model/model/layers/{i}"
    q, down = f"{peft_names}/self_attn/q_proj", f"{peft_names}/mlp/down_proj"
    changes = [
        keep(".*_lora_[ab]"),
        remap(
            [
                ("layers/{i}/attn/q_proj/w_lora_a", f"{q}/lora_A/weight", "e r -> r e"),
                (
                    "layers/{i}/attn/q_proj/w_lora_b",
                    f"{q}/lora_B/weight",
                    "r h d -> (h d) r",
                ),
                (
                    "layers/{i}/mlp/down_proj/kernel_lora_a",
                    f"{down}/lora_A/weight",
                    "f r -> r f",
                ),
                (
                    "layers/{i}/mlp/down_proj/kernel_lora_b",
                    f"{down}/lora_B/weight",
                    "r e -> e r",
                ),
            ],
            h=4,
        ),
    ]
    (tmp_path / "adapter").mkdir()
    flaxckpt.convert(
        tmp_path / "run",
        tmp_path / "adapter/adapter_model.safetensors",
        format="safetensors",
        transforms=changes,
    )
    config = {
        "peft_type": "LORA",
        "r": 3,
        "lora_alpha": 6,
        "target_modules": ["q_proj", "down_proj"],
    }
    (tmp_path / "adapter/adapter_config.json").write_text(json.dumps(config))

    adapted = peft.PeftModel.from_pretrained(model, tmp_path / "adapter").eval()
    with torch.no_grad():
        wanted = adapted(torch.tensor(TOKENS)).logits
    merged = [merge_lora(tmp_path / "adapter")]
    flaxckpt.convert(
        tmp_path / "base/model.safetensors",
        tmp_path / "m.safetensors",
        transforms=merged,
    )
    from safetensors.torch import load_file

    plain = llama().eval()
    plain.load_state_dict(load_file(tmp_path / "m.safetensors"))
    with torch.no_grad():
        found = plain(torch.tensor(TOKENS)).logits
        without = llama().eval()(torch.tensor(TOKENS)).logits
    torch.testing.assert_close(wanted, found, rtol=1e-5, atol=1e-5)
    assert (found - without).abs().max() > 1e-3
