"""Cases of decoders: Llama, Mistral, Mixtral, Qwen and Gemma."""

import importlib
import json

import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from flax import nnx

from tests import ROOT
from tests.maps.cases import Case

IDS = np.arange(22).reshape(2, 11) * 7 % 131

BONSAI = json.loads((ROOT / "tests/maps/bonsai_decoders.json").read_text())
"""The leaf paths and shapes of Bonsai's models with the sizes of these cases."""

BASE = {"source_base": "", "target_base": ""}

SIZES = {
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "vocab_size": 131,
    "max_position_embeddings": 64,
}
WIDE = {**SIZES, "head_dim": 8}
"""Sizes of models whose heads are together wider than the model."""

ROPE = {"rope_theta": 1_000_000.0}
"""Tunix 0.1.7 has this one in Llama and Qwen; Flax classes of transformers, 10,000."""


_MAKERS = {}


def published(name, **options):
    """Returns the function that makes a model of transformers, the same for all cases.

    Args:
        name: Its class, as `LlamaForCausalLM`.
        options: Arguments of its configuration.
    """
    cls = getattr(transformers, name)

    def make():
        return cls(cls.config_class(**options, attn_implementation="eager"))

    return _MAKERS.setdefault((name, json.dumps(options, sort_keys=True)), make)


def reference(model):
    output = model(torch.tensor(IDS))
    values = output.logits if "logits" in output else output.last_hidden_state
    return values.detach().numpy()


# ---- the Flax classes of transformers 4 ---------------------------------------------


def family_of(id):
    """Returns the name of the family, with which the name of a case begins."""
    return id.partition("-")[0]


def causal(family):
    """Returns the class of transformers that a family has for texts."""
    return family.title().replace("_", "") + "ForCausalLM"


def linen(id, options=None, *, name=None, **sizes):
    """Returns the case of a class of transformers, in torch and in Flax."""
    family = family_of(id)
    name = name or causal(family)

    def program(config):
        return getattr(transformers, f"Flax{name}")(config)

    def run(params, config):
        return program(config)(jnp.asarray(IDS), params=params)[0]

    return Case(
        id,
        family,
        "linen",
        published(name, **sizes),
        reference,
        lambda config: program(config).params,
        run,
        options=options or {},
    )


# ---- Tunix --------------------------------------------------------------------------


def tunix(id, **sizes):
    """Returns the case of a model of Tunix, of a configuration with these sizes."""
    family = family_of(id)
    program, arguments = TUNIX[family]

    def state(config):
        pytest.importorskip("tunix", reason="`make test-maps` has Tunix")
        module, cls = program.split(".")
        module = importlib.import_module(f"tunix.models.{module}.model")
        own = module.ModelConfig(**arguments(config, module))
        return getattr(module, cls)(own, rngs=nnx.Rngs(0))

    def run(model, config):
        length = IDS.shape[1]
        positions = jnp.broadcast_to(jnp.arange(length), IDS.shape)
        mask = jnp.broadcast_to(jnp.tri(length, dtype=bool), (len(IDS), length, length))
        return model(jnp.asarray(IDS), positions, None, mask)[0]

    make = published(causal(family), **sizes)
    return Case(id, family, "tunix", make, reference, state, run)


def _common(config):
    return {
        "num_layers": config.num_hidden_layers,
        "embed_dim": config.hidden_size,
        "hidden_dim": config.intermediate_size,
        "num_heads": config.num_attention_heads,
        "num_kv_heads": config.num_key_value_heads,
        "head_dim": getattr(config, "head_dim", None)
        or config.hidden_size // config.num_attention_heads,
    }


def _llama3(config, module, tie="weight_tying"):
    return {
        **_common(config),
        "vocab_size": config.vocab_size,
        "rope_theta": int(config.rope_theta),
        "norm_eps": config.rms_norm_eps,
        tie: config.tie_word_embeddings,
    }


def _qwen(config, module):
    return _llama3(config, module, "use_tied_embedding")


def _qwen3_moe(config, module):
    return {
        **_qwen(config, module),
        "hidden_dim": config.moe_intermediate_size,
        "num_experts": config.num_experts,
        "num_experts_per_tok": config.num_experts_per_tok,
    }


def _gemma1(config, module, is_second=False):
    kinds = module.AttentionType
    local = [kinds.LOCAL_SLIDING, kinds.GLOBAL] if is_second else [kinds.GLOBAL] * 2
    return {
        **_common(config),
        "num_embed": config.vocab_size,
        "final_logit_softcap": getattr(config, "final_logit_softcapping", None),
        "attn_logits_soft_cap": getattr(config, "attn_logit_softcapping", None),
        "sliding_window_size": getattr(config, "sliding_window", None),
        "use_post_attn_norm": is_second,
        "use_post_ffw_norm": is_second,
        "attention_types": local * config.num_hidden_layers,
    }


def _gemma2(config, module):
    return _gemma1(config, module, is_second=True)


def _gemma3(config, module):
    return {
        **_common(config),
        "num_embed": config.vocab_size,
        "sliding_window_size": config.sliding_window,
        "local_base_frequency": int(config.rope_local_base_freq),
        "global_base_frequency": int(config.rope_theta),
        "param_dtype": jnp.float32,
    }


TUNIX = {
    "llama": ("llama3.Llama3", _llama3),
    "qwen2": ("qwen2.Qwen2", _qwen),
    "qwen3": ("qwen3.Qwen3", _qwen),
    "qwen3_moe": ("qwen3.Qwen3", _qwen3_moe),
    "gemma": ("gemma.Gemma", _gemma1),
    "gemma2": ("gemma.Gemma", _gemma2),
    "gemma3": ("gemma3.Gemma3", _gemma3),
}
"""Module and class of Tunix; and what maps the configuration to its arguments."""


# ---- leaves, computed without the tables --------------------------------------------


def tensors_of(model):
    return {name: value.numpy() for name, value in model.state_dict().items()}


def heads(kernel, count):
    """Returns the kernel of torch of a projection to heads, as (input, heads, size)."""
    return kernel.reshape(count, -1, kernel.shape[-1]).transpose(2, 0, 1)


def interleave(kernel):
    """Returns a kernel whose rotary halves alternate."""
    size = kernel.shape[-1]
    order = np.arange(size).reshape(2, size // 2).T.ravel()
    return kernel[..., order]


def head_size(config):
    default = config.hidden_size // config.num_attention_heads
    return getattr(config, "head_dim", None) or default


def maxtext_attention(layer, config, *, scale=True, rotate=lambda kernel: kernel):
    """Returns the leaves of `self_attention` of a layer, whose tensors are `layer`."""
    size = head_size(config)
    q, k, v, o = (layer[f"self_attn.{name}_proj.weight"] for name in "qkvo")
    count = config.num_key_value_heads
    factor = np.float32(1 / np.sqrt(size)) if scale else 1
    leaves = {
        "query/kernel": rotate(heads(q, config.num_attention_heads)) * factor,
        "key/kernel": rotate(heads(k, count)),
        "value/kernel": heads(v, count),
        "out/kernel": np.stack(np.split(o.T, config.num_attention_heads)),
    }
    for name, word in (("query", "q"), ("key", "k"), ("value", "v")):
        if (bias := layer.get(f"self_attn.{word}_proj.bias")) is not None:
            leaves[f"{name}/bias"] = bias.reshape(-1, size)
    return leaves


def maxtext_mlp(layer):
    names = {"wi_0": "gate", "wi_1": "up", "wo": "down"}
    return {
        f"{new}/kernel": layer[f"mlp.{old}_proj.weight"].T for new, old in names.items()
    }


def _llama_layer(layer, config, **options):
    attention = maxtext_attention(layer, config, **options)
    leaves = {f"self_attention/{name}": x for name, x in attention.items()}
    for new, old in (("pre", "input"), ("post", "post_attention")):
        norm = layer[f"{old}_layernorm.weight"]
        leaves[f"{new}_self_attention_layer_norm/scale"] = norm
    return leaves


def llama_layer(layer, config, **options):
    mlp = {f"mlp/{name}": x for name, x in maxtext_mlp(layer).items()}
    return {**_llama_layer(layer, config, **options), **mlp}


def mixtral_layer(layer, config):
    moe = "block_sparse_moe"
    names = {"wi_0": "w1", "wi_1": "w3", "wo": "w2"}
    experts = {
        f"MoeBlock_0/{new}": np.stack(
            [
                layer[f"{moe}.experts.{x}.{old}.weight"].T
                for x in range(config.num_local_experts)
            ]
        )
        for new, old in names.items()
    }
    gate = {"MoeBlock_0/gate/kernel": layer[f"{moe}.gate.weight"].T}
    return {**_llama_layer(layer, config), **experts, **gate}


def qwen3_layer(layer, config, mlp=True):
    leaves = _llama_layer(layer, config, scale=False)
    for new, old in (("query", "q"), ("key", "k")):
        norm = layer[f"self_attn.{old}_norm.weight"]
        leaves[f"self_attention/{new}_norm/scale"] = norm
    if mlp:
        leaves |= {f"mlp/{name}": x for name, x in maxtext_mlp(layer).items()}
    return leaves


def qwen3_moe_layer(layer, config):
    leaves = qwen3_layer(layer, config, mlp=False)
    leaves["moe_block/gate/kernel"] = layer["mlp.gate.weight"].T
    for new, old in (("wi_0", "gate"), ("wi_1", "up"), ("wo", "down")):
        leaves[f"moe_block/{new}"] = np.stack(
            [
                layer[f"mlp.experts.{x}.{old}_proj.weight"].T
                for x in range(config.num_experts)
            ]
        )
    return leaves


def gemma_layer(layer, config, kind="", **options):
    """Returns the leaves of a layer of Gemma 2 or 3; `kind` of attention in names."""
    attention = maxtext_attention(layer, config, **options)
    leaves = {f"self_attention{kind}/{name}": x for name, x in attention.items()}
    leaves |= {f"mlp{kind}/{name}": x for name, x in maxtext_mlp(layer).items()}
    names = {
        "pre_self_attention": "input",
        "post_self_attention": "post_attention",
        "pre_ffw": "pre_feedforward",
        "post_ffw": "post_feedforward",
    }
    for new, old in names.items():
        leaves[f"{new}_norm{kind}/scale"] = layer[f"{old}_layernorm.weight"] + 1
    for new, old in (("query", "q"), ("key", "k")):
        if (norm := layer.get(f"self_attn.{old}_norm.weight")) is not None:
            leaves[f"self_attention/{new}_norm/scale"] = norm + 1
    return leaves


def gemma2_pair(first, second, config):
    local = gemma_layer(first, config, "_local")
    return {**local, **gemma_layer(second, config, "_global")}


def split_layers(tensors):
    """Returns the tensors of each layer, and the others."""
    layers, others = {}, {}
    for name, value in tensors.items():
        if name.startswith("model.layers."):
            number, rest = name.removeprefix("model.layers.").split(".", 1)
            layers.setdefault(int(number), {})[rest] = value
        else:
            others[name] = value
    return [layers[i] for i in sorted(layers)], others


def stack(layers):
    """Returns layers stacked along the second axis."""
    return {name: np.stack([x[name] for x in layers], axis=1) for name in layers[0]}


def below(prefix, leaves):
    return {f"{prefix}/{name}": value for name, value in leaves.items()}


def unscanned(layers):
    return {
        name: x
        for i, layer in enumerate(layers)
        for name, x in below(f"decoder/layers_{i}", layer).items()
    }


def scanned(layers):
    return below("decoder/layers", stack(layers))


def scanned_by_six(layers):
    whole = len(layers) // 6 * 6
    leaves = {}
    for r in range(6):
        leaves |= below(f"decoder/layers/layers_{r}", stack(layers[r:whole:6]))
    for r, layer in enumerate(layers[whole:]):
        leaves |= below(f"decoder/layers_remainder/layers_{r}", layer)
    return leaves


def maxtext(id, make_layers, gather, is_exact=True, normalize=1, **sizes):
    """Returns the case of a layout of MaxText.

    Args:
        id: Name of the case.
        make_layers: Maps the tensors of all layers, and the configuration, to MaxText's
            layers.
        gather: Names the layers, and stacks those that are scanned.
        is_exact: False if values change by rounding.
        normalize: The factor of embeddings; if not 1, norms are greater by 1.
        sizes: Arguments of the configuration.
    """

    def expected(model):
        layers, others = split_layers(tensors_of(model))
        leaves = gather(make_layers(layers, model.config))
        embedding = others["model.embed_tokens.weight"]
        leaves["token_embedder/embedding"] = embedding * np.float32(normalize)
        shift = 0 if normalize == 1 else 1
        leaves["decoder/decoder_norm/scale"] = others["model.norm.weight"] + shift
        if not model.config.tie_word_embeddings:
            leaves["decoder/logits_dense/kernel"] = others["lm_head.weight"].T
        return leaves

    family = family_of(id)
    target = "maxtext" if gather is unscanned else "maxtext-scanned"
    make = published(causal(family), **sizes)
    return Case(
        id, family, target, make, reference, expected=expected, is_exact=is_exact
    )


def both_maxtext(family, make_layers, scan=scanned, suffix="", **options):
    """Returns the cases of MaxText with and without scanned layers."""
    return [
        maxtext(f"{family}-{target}{suffix}", make_layers, gather, **options)
        for target, gather in (("maxtext", unscanned), ("maxtext-scanned", scan))
    ]


def each(make_layer, **options):
    """Returns the function that makes each layer of MaxText of one layer."""
    return lambda layers, config: [make_layer(x, config, **options) for x in layers]


def pairs(layers, config):
    return [
        gemma2_pair(*two, config) for two in zip(layers[::2], layers[1::2], strict=True)
    ]


# ---- Bonsai -------------------------------------------------------------------------


def bonsai(id, expected, **sizes):
    """Returns the case of a layout of Bonsai, whose leaves are recorded."""
    family = family_of(id)

    def state(config):
        tree = {}
        for path, shape in BONSAI[family].items():
            *containers, last = path.split("/")
            node = tree
            for container in containers:
                node = node.setdefault(container, {})
            node[last] = np.zeros(shape, np.float32)
        return tree

    make = published(causal(family), **sizes)
    return Case(id, family, "bonsai", make, reference, state, expected=expected)


def bonsai_qwen3(model):
    config = model.config
    layers, others = split_layers(tensors_of(model))
    leaves = {
        "embedder/embedding": others["model.embed_tokens.weight"],
        "final_norm/scale": others["model.norm.weight"],
        "lm_head/kernel": others["lm_head.weight"].T,
    }
    for i, layer in enumerate(layers):
        attention = maxtext_attention(layer, config, scale=False)
        names = {"query": "q_proj", "key": "k_proj", "value": "v_proj", "out": "o_proj"}
        for old, new in names.items():
            leaves[f"layers/{i}/attn/{new}/kernel"] = attention[f"{old}/kernel"]
        for norm in ("q_norm", "k_norm"):
            leaves[f"layers/{i}/attn/{norm}/scale"] = layer[f"self_attn.{norm}.weight"]
        for norm in ("input_layernorm", "post_attention_layernorm"):
            leaves[f"layers/{i}/{norm}/scale"] = layer[f"{norm}.weight"]
        for part in ("gate_proj", "up_proj", "down_proj"):
            leaves[f"layers/{i}/mlp/{part}/kernel"] = layer[f"mlp.{part}.weight"].T
    return leaves


def bonsai_gemma3(model):
    layers, others = split_layers(tensors_of(model))
    leaves = {
        "embed_tokens/weight/embedding": others["model.embed_tokens.weight"],
        "language_model/norm/scale": others["model.norm.weight"],
    }
    for i, layer in enumerate(layers):
        for name, value in layer.items():
            new = "kernel" if value.ndim == 2 else "scale"
            path = name.replace(".", "/").removesuffix("weight") + new
            leaves[f"language_model/layers/{i}/{path}"] = value.T
    return leaves


# ---- cases --------------------------------------------------------------------------

SCALING = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}

_BIASES = {"attention_bias": True}
_TIED = {"tie_word_embeddings": True}
_MOE = {**WIDE, "moe_intermediate_size": 20, "num_experts": 5, "num_experts_per_tok": 2}
_GEMMA1 = {**WIDE, "hidden_activation": "gelu_pytorch_tanh"}
_GEMMA2 = {
    **_GEMMA1,
    "num_hidden_layers": 4,
    "query_pre_attn_scalar": 8,
    "sliding_window": 4,
}
_GEMMA3 = {**_GEMMA2, "num_hidden_layers": 8}
_SQRT = 24**0.5

CASES = (
    linen("llama-linen", **SIZES),
    linen("llama-linen-tied", **SIZES, **_TIED),
    linen("llama-linen-biases", **SIZES, **_BIASES),
    linen("llama-linen-base", BASE, name="LlamaModel", **SIZES),
    tunix("llama-tunix", **SIZES, **ROPE),
    tunix("llama-tunix-tied", **WIDE, **ROPE, **_TIED),
    *both_maxtext("llama", each(llama_layer), **SIZES, is_exact=False),
    *both_maxtext(
        "llama",
        each(llama_layer, rotate=interleave),
        suffix="-scaled",
        is_exact=False,
        **WIDE,
        rope_scaling=SCALING,
    ),
    linen("mistral-linen", **SIZES),
    linen("mistral-linen-base", BASE, name="MistralModel", **SIZES),
    *both_maxtext("mistral", each(llama_layer), is_exact=False, **WIDE),
    *both_maxtext(
        "mixtral", each(mixtral_layer), is_exact=False, **WIDE, num_local_experts=5
    ),
    tunix("qwen2-tunix", **SIZES, **ROPE),
    tunix("qwen2-tunix-tied", **SIZES, **ROPE, **_TIED),
    *both_maxtext("qwen2", each(llama_layer, scale=False), **SIZES),
    tunix("qwen3-tunix", **WIDE, **ROPE),
    tunix("qwen3-tunix-tied", **WIDE, **ROPE, **_TIED),
    bonsai("qwen3-bonsai", bonsai_qwen3, **WIDE),
    bonsai("qwen3-bonsai-tied", bonsai_qwen3, **WIDE, **_TIED),
    *both_maxtext("qwen3", each(qwen3_layer), **WIDE),
    *both_maxtext("qwen3", each(qwen3_layer), suffix="-tied", **WIDE, **_TIED),
    tunix("qwen3_moe-tunix", **_MOE, **ROPE, norm_topk_prob=True),
    *both_maxtext("qwen3_moe", each(qwen3_moe_layer), **_MOE),
    linen("gemma-linen", **_GEMMA1),
    linen("gemma-linen-biases", **_GEMMA1, **_BIASES),
    tunix("gemma-tunix", **_GEMMA1),
    tunix("gemma2-tunix", **_GEMMA2),
    tunix("gemma2-tunix-same-heads", **{**_GEMMA2, "num_key_value_heads": 6}),
    *both_maxtext("gemma2", pairs, is_exact=False, normalize=_SQRT, **_GEMMA2),
    tunix("gemma3-tunix", **_GEMMA3),
    tunix("gemma3-tunix-same-heads", **{**_GEMMA3, "num_key_value_heads": 6}),
    bonsai("gemma3-bonsai", bonsai_gemma3, **_GEMMA3),
    *both_maxtext(
        "gemma3",
        each(gemma_layer, scale=False),
        scanned_by_six,
        is_exact=False,
        normalize=float(jnp.bfloat16(_SQRT)),
        **_GEMMA3,
    ),
)
