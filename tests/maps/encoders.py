"""Cases of encoders, of models with encoder and decoder, and of GPT-2."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import torch
import transformers

from tests import ROOT
from tests.maps.cases import Case

# transformers 4 calls jnp.clip with an argument that newer versions of jax lack.
_clip = jnp.clip


def _clip_with_a_max(x, /, *limits, a_max=None, **options):
    return _clip(x, *limits, **options, **({} if a_max is None else {"max": a_max}))


jnp.clip = _clip_with_a_max

IDS = np.arange(22).reshape(2, 11) * 7 % 131 + 4
DECODER_IDS = IDS[:, ::2] * 5 % 127 + 4
IMAGES = np.random.default_rng(1).normal(size=(2, 3, 12, 12)).astype(np.float32)
SOUND = np.random.default_rng(2).normal(size=(2, 10, 32)).astype(np.float32)

BONSAI = json.loads((ROOT / "tests/maps/bonsai_encoders.json").read_text())
"""The leaf paths and shapes of Bonsai's models with the sizes of these cases."""


def _outputs(output):
    """Returns the outputs that models of torch and Flax share, as one array."""
    names = (
        "logits",
        "prediction_logits",
        "seq_relationship_logits",
        "start_logits",
        "end_logits",
        "last_hidden_state",
        "pooler_output",
        "logits_per_text",
        "text_embeds",
        "image_embeds",
    )
    parts = (output[name] for name in names if output.get(name) is not None)
    arrays = [x.detach().numpy() if isinstance(x, torch.Tensor) else x for x in parts]
    return np.concatenate([np.ravel(x) for x in arrays])


def _linen(id, config, name, inputs, *, flax="", options=None):
    """Returns the case of a class of transformers.

    Args:
        id: Name of the case, which begins with that of the family.
        config: The configuration.
        name: Class of torch.
        inputs: Arguments of both models.
        flax: Class of Flax, without the prefix; by default of the same name.
        options: Further arguments of the map.
    """

    def program(config):
        return getattr(transformers, f"Flax{flax or name}")(config, _do_init=False)

    def state(config):
        shapes = program(config).params_shape_tree
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)

    def reference(model):
        return _outputs(model(**{k: torch.tensor(x) for k, x in inputs.items()}))

    def run(params, config):
        return _outputs(program(config)(**inputs, params=params))

    make = functools.partial(_make, name, config)
    options, family = options or {}, id.partition("-")[0]
    return Case(id, family, "linen", make, reference, state, run, options=options)


def _make(name, config):
    return getattr(transformers, name)(config)


BASE_TO_BASE = {"source_base": "", "target_base": ""}

# ---- GPT-2 --------------------------------------------------------------------------

_TEXT = {"input_ids": IDS}


def _gpt2(**options):
    return transformers.GPT2Config(
        n_layer=3, n_head=3, n_embd=24, vocab_size=131, n_positions=20, **options
    )


_GPT2 = (
    _linen("gpt2-linen", _gpt2(), "GPT2LMHeadModel", _TEXT),
    _linen(
        "gpt2-linen-untied",
        _gpt2(tie_word_embeddings=False, n_inner=40),
        "GPT2LMHeadModel",
        _TEXT,
    ),
    _linen("gpt2-linen-base", _gpt2(), "GPT2Model", _TEXT, options=BASE_TO_BASE),
)

# ---- BERT, RoBERTa ------------------------------------------------------------------

_PADDED = {"input_ids": IDS, "attention_mask": np.array([[1] * 11, [1] * 7 + [0] * 4])}
_SIZES = {
    "hidden_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "intermediate_size": 40,
    "vocab_size": 131,
    "max_position_embeddings": 20,
}


def _of_bert(kind, name, labels=5, **options):
    config = transformers.BertConfig(**_SIZES, num_labels=labels)
    return _linen(f"bert-linen-{kind}", config, name, _PADDED, **options)


def _of_roberta(kind, name, **options):
    config = transformers.RobertaConfig(**_SIZES, num_labels=5)
    return _linen(f"roberta-linen-{kind}", config, name, _PADDED, **options)


_BERT = (
    _of_bert("pretraining", "BertForPreTraining"),
    _of_bert("masked-lm", "BertForMaskedLM"),
    _of_bert("classifier", "BertForSequenceClassification"),
    _of_bert("questions", "BertForQuestionAnswering", labels=2),
    _of_bert("base", "BertModel", options=BASE_TO_BASE),
)
_ROBERTA = (
    _of_roberta("masked-lm", "RobertaForMaskedLM"),
    _of_roberta("classifier", "RobertaForSequenceClassification"),
    _of_roberta("tokens", "RobertaForTokenClassification"),
    _of_roberta("base", "RobertaModel", options=BASE_TO_BASE),
)

# ---- T5 -----------------------------------------------------------------------------


def _of_t5(kind, name, inputs, **options):
    config = transformers.T5Config(
        d_model=24,
        d_kv=5,
        d_ff=40,
        num_layers=3,
        num_heads=3,
        vocab_size=131,
        relative_attention_num_buckets=8,
        relative_attention_max_distance=6,
        **options,
    )
    return _linen(f"t5-linen-{kind}", config, name, inputs)


_TEXT_TO_TEXT = {**_PADDED, "decoder_input_ids": DECODER_IDS}

_T5 = (
    _of_t5("relu-tied", "T5ForConditionalGeneration", _TEXT_TO_TEXT),
    _of_t5(
        "gated-untied",
        "T5ForConditionalGeneration",
        _TEXT_TO_TEXT,
        feed_forward_proj="gated-gelu",
        tie_word_embeddings=False,
        num_decoder_layers=2,
    ),
    _of_t5("base", "T5Model", _TEXT_TO_TEXT, feed_forward_proj="gated-silu"),
    _of_t5("encoder", "T5EncoderModel", _PADDED),
)

# ---- ViT, CLIP ----------------------------------------------------------------------

_PIXELS = {"pixel_values": IMAGES}
_VISION_SIZES = {
    "hidden_size": 30,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "intermediate_size": 40,
    "image_size": 12,
    "patch_size": 4,
}


def _vit(**options):
    return transformers.ViTConfig(**_VISION_SIZES, num_labels=5, **options)


def _clip_config():
    vision = {**_VISION_SIZES, "hidden_size": 28, "num_attention_heads": 7}
    return transformers.CLIPConfig(
        text_config={**_SIZES, "eos_token_id": 2},
        vision_config={**vision, "num_hidden_layers": 2},
        projection_dim=9,
    )


_VIT = (
    _linen("vit-linen", _vit(), "ViTForImageClassification", _PIXELS),
    _linen("vit-linen-base", _vit(), "ViTModel", _PIXELS, options=BASE_TO_BASE),
    _linen(
        "vit-linen-no-bias", _vit(qkv_bias=False), "ViTForImageClassification", _PIXELS
    ),
)
_CLIP = (
    _linen("clip-linen", _clip_config(), "CLIPModel", {**_PADDED, **_PIXELS}),
    _linen("clip-linen-text", _clip_config().text_config, "CLIPTextModel", _PADDED),
    _linen(
        "clip-linen-text-projection",
        _clip_config().text_config,
        "CLIPTextModelWithProjection",
        _PADDED,
    ),
    _linen(
        "clip-linen-vision", _clip_config().vision_config, "CLIPVisionModel", _PIXELS
    ),
)

# ---- Whisper ------------------------------------------------------------------------


def _whisper(**options):
    sizes = {"d_model": 30, "encoder_layers": 3, "decoder_layers": 2}
    heads = {"encoder_attention_heads": 3, "decoder_attention_heads": 3}
    feed_forward = {"encoder_ffn_dim": 40, "decoder_ffn_dim": 36}
    positions = {"max_source_positions": 16, "max_target_positions": 20}
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    return transformers.WhisperConfig(
        **{**sizes, **heads, **feed_forward, **positions, **tokens, **options},
        vocab_size=131,
        num_mel_bins=10,
        decoder_start_token_id=3,
        num_labels=5,
        classifier_proj_size=6,
    )


_SPEECH = {"input_features": SOUND, "decoder_input_ids": DECODER_IDS}
_GENERATION = "WhisperForConditionalGeneration"

_WHISPER = (
    _linen("whisper-linen", _whisper(decoder_attention_heads=5), _GENERATION, _SPEECH),
    _linen(
        "whisper-linen-untied",
        _whisper(tie_word_embeddings=False),
        _GENERATION,
        _SPEECH,
    ),
    _linen(
        "whisper-linen-base", _whisper(), "WhisperModel", _SPEECH, options=BASE_TO_BASE
    ),
    _linen(
        "whisper-linen-classifier",
        _whisper(),
        "WhisperForAudioClassification",
        {"input_features": SOUND},
        options=BASE_TO_BASE,
    ),
)

# ---- Bonsai -------------------------------------------------------------------------


def _tensors(model):
    return {name: x.detach().numpy() for name, x in model.state_dict().items()}


def _norm(tensors, name, target):
    return {
        f"{target}/scale": tensors[f"{name}.weight"],
        f"{target}/bias": tensors[f"{name}.bias"],
    }


def _dense(tensors, name, target):
    return {
        f"{target}/kernel": tensors[f"{name}.weight"].T,
        f"{target}/bias": tensors[f"{name}.bias"],
    }


def _heads(tensors, names, target, heads):
    """Returns the leaves of nnx.MultiHeadAttention.

    Args:
        tensors: Tensors of torch.
        names: The modules for queries, keys, values and outputs.
        target: Leaf path.
        heads: The number of heads.
    """
    leaves = {}
    for name, part in zip(names, ("query", "key", "value"), strict=False):
        kernel = tensors[f"{name}.weight"].T
        leaves[f"{target}/{part}/kernel"] = kernel.reshape(len(kernel), heads, -1)
        if f"{name}.bias" in tensors:
            bias = tensors[f"{name}.bias"].reshape(heads, -1)
            leaves[f"{target}/{part}/bias"] = bias
    kernel = tensors[f"{names[3]}.weight"].T
    leaves[f"{target}/out/kernel"] = kernel.reshape(heads, -1, kernel.shape[-1])
    leaves[f"{target}/out/bias"] = tensors[f"{names[3]}.bias"]
    return leaves


def _bonsai_vit(model):
    t, heads = _tensors(model), model.config.num_attention_heads
    embeddings = "vit.embeddings"
    patches = f"{embeddings}.patch_embeddings.projection"
    leaves = {
        "pos_embeddings/cls_token": t[f"{embeddings}.cls_token"],
        "pos_embeddings/pos_embeddings": t[f"{embeddings}.position_embeddings"],
        "pos_embeddings/projection/kernel": t[f"{patches}.weight"].transpose(
            2, 3, 1, 0
        ),
        "pos_embeddings/projection/bias": t[f"{patches}.bias"],
        **_norm(t, "vit.layernorm", "ln"),
        **_dense(t, "classifier", "classifier"),
    }
    for i in range(model.config.num_hidden_layers):
        layer, to = f"vit.encoder.layer.{i}", f"layers/{i}"
        parts = [f"{layer}.attention.attention.{p}" for p in ("query", "key", "value")]
        names = [*parts, f"{layer}.attention.output.dense"]
        leaves |= {
            **_heads(t, names, f"{to}/attention", heads),
            **_dense(t, f"{layer}.intermediate.dense", f"{to}/linear1"),
            **_dense(t, f"{layer}.output.dense", f"{to}/linear2"),
            **_norm(t, f"{layer}.layernorm_before", f"{to}/layernorm_before"),
            **_norm(t, f"{layer}.layernorm_after", f"{to}/layernorm_after"),
        }
    return leaves


def _bonsai_whisper(model):
    t, heads = _tensors(model), model.config.encoder_attention_heads
    leaves = {}
    for name in ("conv1", "conv2"):
        kernel = t[f"model.encoder.{name}.weight"].transpose(2, 1, 0)
        leaves[f"encoder/{name}/kernel"] = kernel
        leaves[f"encoder/{name}/bias"] = t[f"model.encoder.{name}.bias"]
    for path in ("encoder/embed_positions", "decoder/embed_positions"):
        name = f"model.{path.replace('/', '.')}.weight"
        leaves[f"{path}/embedding"] = t[name]
    leaves["decoder/embed_tokens/embedding"] = t["model.decoder.embed_tokens.weight"]
    for part, count in (("encoder", 3), ("decoder", 2)):
        leaves |= _norm(t, f"model.{part}.layer_norm", f"{part}/layer_norm")
        attentions = ["self_attn", "encoder_attn"][: 1 + (part == "decoder")]
        for i in range(count):
            layer, to = f"model.{part}.layers.{i}", f"{part}/layers/{i}"
            for name in attentions:
                parts = [f"{layer}.{name}.{p}_proj" for p in ("q", "k", "v", "out")]
                leaves |= _heads(t, parts, f"{to}/{name}", heads)
                norm = f"{name}_layer_norm"
                leaves |= _norm(t, f"{layer}.{norm}", f"{to}/{norm}")
            for name in ("fc1", "fc2"):
                leaves |= _dense(t, f"{layer}.{name}", f"{to}/{name}")
            norm = "final_layer_norm"
            leaves |= _norm(t, f"{layer}.{norm}", f"{to}/{norm}")
    return leaves


def _bonsai(family, published, expected):
    return Case(
        id=f"{family}-bonsai",
        family=family,
        target="bonsai",
        published=published,
        reference=lambda model: None,
        expected=expected,
    )


def _make_whisper():
    return _make(_GENERATION, _whisper())


_OF_BONSAI = (
    _bonsai("vit", _VIT[0].published, _bonsai_vit),
    _bonsai("whisper", _make_whisper, _bonsai_whisper),
)

CASES = (*_GPT2, *_BERT, *_ROBERTA, *_T5, *_VIT, *_CLIP, *_WHISPER, *_OF_BONSAI)
