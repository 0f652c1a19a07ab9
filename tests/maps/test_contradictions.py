"""Configurations that contradict the tensors, and models that are found anyway."""

import contextlib
import json
import logging

import jax
import numpy as np
import pytest
from flax import nnx
from safetensors import numpy as safetensors

import flaxckpt
from flaxckpt import errors, formats, maps
from flaxckpt.transforms import inverse
from tests.helpers import command_line
from tests.helpers import published as hf

TARGETS = ["linen", "tunix", "maxtext", "maxtext-scanned"]

WRONG = {
    "hidden_size": 48,
    "vocab_size": 32,
    "intermediate_size": 24,
    "num_attention_heads": 12,
    "num_key_value_heads": 3,
    "head_dim": 8,
    "num_hidden_layers": 2,
}
"""A wrong value of each size."""


@pytest.fixture
def model(tmp_path):
    return hf.write_llama(tmp_path / "published")


@contextlib.contextmanager
def refused(*words, error=errors.OptionError):
    """Expects an error with a short message that has all words."""
    with pytest.raises(error) as caught:
        yield
    text = str(caught.value)
    assert text.count("\n") < 15
    for word in words:
        assert word in text, text


def export(tmp_path, config, **options):
    """Exports the saved state `x` to `out`."""
    flaxckpt.export_huggingface(
        tmp_path / "x", tmp_path / "out", config=config, **options
    )


def nnx_of(params):
    """Returns an NNX module with the leaves of nested dicts."""

    class Model(nnx.Module):
        def __init__(self):
            for name, value in params.items():
                setattr(self, name, nnx.data(jax.tree.map(nnx.Param, value)))

    return Model()


STATES = {"dict": lambda params: params, "NNX": nnx_of}


# ---- sizes --------------------------------------------------------------------------


@pytest.mark.parametrize("key", WRONG)
@pytest.mark.parametrize("target", TARGETS)
def test_rejects_wrong_sizes_without_state(model, key, target):
    config = hf.LLAMA | {key: WRONG[key]}
    with refused("model/"):
        flaxckpt.load(model, transforms=maps.llama(config, target=target))


def test_error_names_tensors_and_both_sizes(model):
    changes = maps.llama(hf.LLAMA | {"intermediate_size": 24}, target="linen")
    with refused(
        "maps.llama: tensors contradict its config",
        "model/layers/0/mlp/down_proj/weight: wanted (hidden_size 24,"
        " intermediate_size 24), found (24, 20)",
        "these tensors have intermediate_size 20",
    ):
        flaxckpt.load(model, transforms=changes)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("key", WRONG)
@pytest.mark.parametrize(
    ("kind", "target"), [("NNX", "tunix"), *(("dict", target) for target in TARGETS)]
)
def test_export_rejects_config_contradicting_arrays(tmp_path, model, key, target, kind):
    params = flaxckpt.load(model, transforms=maps.llama(model, target=target))
    flaxckpt.save(tmp_path / "x", {"params": STATES[kind](params)})
    config = hf.LLAMA | {key: WRONG[key]}
    with refused():
        export(tmp_path, config)
    assert not (tmp_path / "out").exists()


def test_export_distinguishes_equal_products_of_heads(tmp_path, model):
    config = hf.LLAMA | {"num_attention_heads": 3, "num_key_value_heads": 2}
    changes = maps.llama(model, target="linen", prefix="params")
    flaxckpt.save(tmp_path / "x", flaxckpt.load(model, transforms=changes))
    with refused("k_proj", "wanted", "16", "found (8, 24)"):
        export(tmp_path, config)


def test_export_compares_list_of_transforms_with_config(tmp_path, model):
    changes = maps.llama(model, target="linen")
    flaxckpt.save(tmp_path / "x", flaxckpt.load(model, transforms=changes))
    with pytest.raises(errors.OptionError, match=r"wanted .*hidden_size 48"):
        flaxckpt.export_huggingface(
            tmp_path / "x",
            tmp_path / "out",
            map=changes,
            config=hf.LLAMA | {"hidden_size": 48},
        )


# ---- vocabularies -------------------------------------------------------------------


def save_grown(directory, model, target, rows, *, head_rows=None):
    """Saves the parameters with more rows in the embedding and in the head."""
    params = flaxckpt.load(model, transforms=maps.llama(model, target=target))

    def grow(path, x):
        text = jax.tree_util.keystr(path)
        if "embed" not in text and "head" not in text and "logits" not in text:
            return x
        axis = x.shape.index(31)
        count = head_rows if head_rows and "embed" not in text else rows
        widths = [(0, count - 31 if i == axis else 0) for i in range(x.ndim)]
        return np.pad(x, widths)

    flaxckpt.save(directory, {"params": jax.tree_util.tree_map_with_path(grow, params)})


@pytest.mark.parametrize("target", ["linen", "tunix"])
def test_exported_config_has_grown_vocabulary(tmp_path, model, target, caplog):
    save_grown(tmp_path / "x", model, target, 40)
    with caplog.at_level(logging.WARNING):
        export(tmp_path, model)
    assert "config.json gets vocab_size 40, not 31" in caplog.text
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config == hf.LLAMA | {"vocab_size": 40}
    assert flaxckpt.metadata(tmp_path / "out").leaves[
        "model/embed_tokens/weight"
    ].shape == (40, 24)


def test_export_rejects_embedding_and_head_of_different_sizes(tmp_path, model):
    save_grown(tmp_path / "x", model, "linen", 40, head_rows=39)
    with refused("lm_head/weight: wanted (vocab_size 31", "found (39, 24)"):
        export(tmp_path, model)


def test_export_rejects_maxtext_padded_vocabulary_with_advice(tmp_path, model):
    save_grown(tmp_path / "x", model, "maxtext", 128)
    with refused("found (128, 24)", "slice(pattern, shape), to 31 rows"):
        export(tmp_path, model)
    export(
        tmp_path,
        model,
        transforms=[
            flaxckpt.transforms.slice(".*token_embedder/embedding", (31, None)),
            flaxckpt.transforms.slice(".*logits_dense/kernel", (None, 31)),
        ],
    )
    assert json.loads((tmp_path / "out/config.json").read_text()) == hf.LLAMA


# ---- dtypes -------------------------------------------------------------------------


@pytest.mark.parametrize("keys", [["dtype"], ["torch_dtype"], ["dtype", "torch_dtype"]])
def test_export_keeps_dtype_key(tmp_path, model, keys):
    config = {k: v for k, v in hf.LLAMA.items() if k != "torch_dtype"}
    changes = maps.llama(model, target="linen")
    flaxckpt.save(tmp_path / "x", flaxckpt.load(model, transforms=changes))
    for name, has in (("a", keys), ("b", [])):
        flaxckpt.export_huggingface(
            tmp_path / "x",
            tmp_path / name,
            config=config | dict.fromkeys(has, "float32"),
            dtype="bfloat16",
        )
        found = json.loads((tmp_path / name / "config.json").read_text())
        assert found == config | dict.fromkeys(has or ["dtype"], "bfloat16")


# ---- ties ---------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_error_for_head_of_tied_model_names_key(tmp_path, model, target):
    """In the checkpoint, and on the way back."""
    tied = hf.LLAMA | {"tie_word_embeddings": True}
    with refused("lm_head/weight", "pass the config with tie_word_embeddings: False"):
        flaxckpt.load(model, transforms=maps.llama(tied, target=target))
    changes = maps.llama(model, target=target, prefix="params")
    flaxckpt.save(tmp_path / "x", flaxckpt.load(model, transforms=changes))
    with refused("tie_word_embeddings is False"):
        export(tmp_path, tied)
    export(tmp_path, hf.LLAMA)


# ---- finding ------------------------------------------------------------------------


def test_config_without_model_type_uses_requested_family(tmp_path, model):
    config = {k: v for k, v in hf.LLAMA.items() if k != "model_type"}
    (model / "config.json").write_text(json.dumps(config))
    params = flaxckpt.load(model, transforms=maps.llama(hf.LLAMA, target="tunix"))
    with refused("no model_type", "'llama'"):
        maps.find(model, params)
    with flaxckpt.Checkpointer(tmp_path / "run") as run:
        on_step = flaxckpt.CheckpointCallback(run, every_steps=1)
        found, _ = on_step.restore_or_init(
            jax.tree.map(np.zeros_like, params), source=model, source_map="llama"
        )
    jax.tree.map(np.testing.assert_array_equal, found, params)
    options = ("--map", "llama", "--target", "tunix")
    command_line.run("convert", model, tmp_path / "converted", *options)
    converted = flaxckpt.load(tmp_path / "converted")
    jax.tree.map(np.testing.assert_array_equal, converted, params)


def test_error_for_base_model_names_option(tmp_path, model):
    alone = hf.write_llama(tmp_path / "alone", base_alone=True)
    with refused("found embed_tokens/weight: pass source_base=''"):
        flaxckpt.load(alone, transforms=maps.llama(alone, target="linen"))
    whole = maps.llama(model, target="linen", source_base="", target_base="")
    with refused("found model/embed_tokens/weight: leave source_base='' out"):
        flaxckpt.load(model, transforms=whole)
    bases = {"source_base": "", "target_base": ""}
    params = flaxckpt.load(alone, transforms=maps.llama(alone, target="linen", **bases))
    flaxckpt.save(tmp_path / "x", params)
    back = inverse(maps.llama(alone, target="linen", source_base=""))
    with refused("found embed_tokens/embedding: pass target_base=''"):
        flaxckpt.load(tmp_path / "x", transforms=back)


@pytest.mark.parametrize("kind", STATES)
def test_rejects_state_of_other_sizes_with_shapes(model, kind):
    params = flaxckpt.load(model, transforms=maps.llama(model, target="tunix"))
    wrong = jax.tree.map(lambda x: np.zeros([*x.shape[:-1], x.shape[-1] + 1]), params)
    with refused("embedder/input_embedding (31, 25), found (31, 24)"):
        maps.find(model, STATES[kind](wrong))


def test_rejects_checkpoint_contradicting_its_config(model):
    params = flaxckpt.load(model, transforms=maps.llama(model, target="tunix"))
    wrong = hf.LLAMA | {"intermediate_size": 24}
    (model / "config.json").write_text(json.dumps(wrong))
    with refused("intermediate_size 24), found (24, 20)"):
        maps.find(model, params)


def test_error_names_checkpoint_given_as_config(model):
    with refused("is a checkpoint, not a configuration", "pass the path of its config"):
        maps.llama(model / "model.safetensors", target="linen")


# ---- Gemma 2 with an odd number of layers, Gemma 3 with images ----------------------

GEMMA = {
    "model_type": "gemma2",
    "hidden_size": 6,
    "intermediate_size": 5,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 4,
    "vocab_size": 11,
}


def gemma(begin="model.", **options):
    norms = ("input", "post_attention", "pre_feedforward", "post_feedforward")
    return hf.decoder_tensors(3, begin=begin, norms=norms, **options)


def test_odd_layer_count_does_not_hide_other_layouts(tmp_path):
    source = hf.write(tmp_path / "gemma", gemma(), GEMMA)
    changes = maps.gemma2(source, target="tunix", prefix="params")
    state = flaxckpt.load(source, transforms=changes)
    assert list(map(str, maps.find(source, state))) == list(map(str, changes))
    flaxckpt.save(tmp_path / "x", state)
    export(tmp_path, source)
    assert safetensors.load_file(tmp_path / "out/model.safetensors").keys() == (
        gemma().keys()
    )
    with pytest.raises(errors.OptionError, match="3 of the config is not divisible"):
        flaxckpt.export_huggingface(
            tmp_path / "x", tmp_path / "other", config=source, target="maxtext"
        )


@pytest.mark.parametrize("begin", ["language_model.model.", "model.language_model."])
def test_finds_gemma_3_language_model(tmp_path, begin):
    text = {k: v for k, v in GEMMA.items() if k != "vocab_size"}
    text["model_type"] = "gemma3_text"
    config = {"model_type": "gemma3", "text_config": text, "vision_config": {}}
    norms = ("q_norm", "k_norm")
    tensors = gemma(begin, more=norms)
    vision = {"vision_tower.vision_model.embeddings.weight": np.ones(3, np.float32)}
    source = hf.write(tmp_path / "gemma", tensors | vision, config)
    assert "without 1 leaf of other parts" in maps.detect(source).evidence
    alone = hf.write(tmp_path / "alone", gemma(more=norms), text)
    wanted = flaxckpt.load(alone, transforms=maps.gemma3(text, target="tunix"))
    changes = maps.find(source, wanted)
    found = flaxckpt.load(source, wanted, transforms=changes)
    jax.tree.map(np.testing.assert_array_equal, found, wanted)
    with refused("config['text_config']"):
        maps.gemma3(source, target="tunix")
    flaxckpt.save(tmp_path / "x", found)
    with refused("pass config['text_config']"):
        export(tmp_path, source)
    export(tmp_path, text)


@pytest.mark.parametrize(
    "changed", [{"mlp_only_layers": [0]}, {"decoder_sparse_step": 2}]
)
def test_rejects_dense_layers_among_experts(changed):
    config = GEMMA | {"model_type": "qwen3_moe", "num_experts": 4}
    assert maps.qwen3_moe(config | {"mlp_only_layers": []}, target="tunix")
    for target in maps.qwen3_moe.targets:
        with refused(*changed, "layers without experts"):
            maps.qwen3_moe(config | changed, target=target)


# ---- tensors that a config states, and no row has ------------------------------------


@pytest.mark.parametrize("target", TARGETS)
def test_biases_require_layout_with_biases(tmp_path, model, target):
    """Their tensors may be missing, so that no other check sees them."""
    biased = hf.LLAMA | {"attention_bias": True}
    params = flaxckpt.load(model, transforms=maps.llama(model, target=target))
    flaxckpt.save(tmp_path / "x", {"params": params})
    with refused("self_attn" if target == "linen" else "attention_bias True"):
        flaxckpt.load(model, transforms=maps.llama(biased, target=target))
    with refused("self_attn" if target == "linen" else "attention_bias True"):
        export(tmp_path, biased)
    assert not (tmp_path / "out").exists()


def test_error_names_config_key_of_unexpected_biases(tmp_path):
    source = hf.write_llama(tmp_path / "published")
    tensors = safetensors.load_file(source / "model.safetensors")
    for i in range(3):
        for name, size in (("q", 24), ("k", 8), ("v", 8), ("o", 24)):
            bias = np.ones(size, np.float32)
            tensors[f"model.layers.{i}.self_attn.{name}_proj.bias"] = bias
    safetensors.save_file(tensors, source / "model.safetensors")
    with refused("q_proj/bias: wanted attention_bias, found attention_bias None"):
        flaxckpt.load(source, transforms=maps.llama(source, target="linen"))
    changes = maps.llama(hf.LLAMA | {"attention_bias": True}, target="linen")
    state = flaxckpt.load(source, transforms=changes)
    assert (state["model"]["layers"]["2"]["self_attn"]["k_proj"]["bias"] == 1).all()


@pytest.mark.parametrize(
    ("family", "changed"),
    [
        ("llama", {"mlp_bias": True}),
        *(
            (family, {"attention_bias": True})
            for family in ("gemma2", "gemma3", "qwen3", "qwen3_moe")
        ),
        *((family, {"add_cross_attention": True}) for family in ("bert", "gpt2")),
        *(
            (family, {"position_embedding_type": "relative_key"})
            for family in ("bert", "roberta")
        ),
    ],
)
def test_rejects_config_options_without_rows(family, changed):
    family = getattr(maps, family)
    sizes = {"num_hidden_layers": 2, "num_experts": 2}
    [(key, value)] = changed.items()
    for target in family.targets:
        with refused(f"target={target!r} has no place for {key} {value!r}"):
            family({**sizes, **changed}, target=target)


# ---- quantized models ---------------------------------------------------------------

FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}


def quantize(model, entry):
    """Gives the configuration of a model an entry; the scales have been dropped."""
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(
        json.dumps(config | {"quantization_config": entry})
    )


@pytest.mark.parametrize("target", TARGETS)
def test_rejects_quantized_model(tmp_path, model, target):
    params = flaxckpt.load(model, transforms=maps.llama(model, target=target))
    quantize(model, FP8)
    for find in (
        lambda: maps.llama(model, target=target),
        lambda: maps.find(model, params),
    ):
        with refused("quantization_config of 'fp8'", "dequantize it"):
            find()
    options = ("--map", "auto", "--target", target)
    told = command_line.run("convert", model, tmp_path / "out", *options, code=2)
    assert "dequantize it" in told
    assert maps.detect(model).family is maps.llama
    quantize(model, None)
    assert maps.find(model, params)


def test_rejects_language_model_of_quantized_model(tmp_path):
    text = {**GEMMA, "model_type": "gemma3_text"}
    config = {"model_type": "gemma3", "text_config": text, "quantization_config": {}}
    tensors = gemma("language_model.model.", more=("q_norm", "k_norm"))
    source = hf.write(tmp_path / "gemma", tensors, config)
    options = ("--map", "auto", "--target", "tunix")
    told = command_line.run("convert", source, tmp_path / "out", *options, code=2)
    assert "the config has a quantization_config" in " ".join(told.split())


def test_suggest_treats_all_quantized_leaves_as_ambiguous(model):
    params = flaxckpt.load(model, transforms=maps.llama(model, target="linen"))
    assert flaxckpt.suggest(model, params).transforms
    quantize(model, FP8)
    suggestion = flaxckpt.suggest(model, params)
    with refused(
        "config.json has a quantization_config of 'fp8'", "without their scales"
    ):
        _ = suggestion.transforms
    assert set(suggestion.ambiguous[0].leaves) == set(suggestion.leaves)
    file = flaxckpt.suggest(model / "model.safetensors", params)
    assert file.ambiguous == suggestion.ambiguous


# ---- files beside each other --------------------------------------------------------


def test_ignores_consolidated_copy(model):
    other = {"layers.0.attention.wq.weight": np.ones((2, 2), np.float32)}
    safetensors.save_file(other, model / "consolidated.safetensors")
    assert "model.safetensors" in str(formats.detect(model))
    leaves = flaxckpt.load(model, transforms=maps.llama(model, target="linen"))
    assert "model" in leaves
    (model / "model.safetensors").unlink()
    assert flaxckpt.load(model).keys() == {"layers"}
    safetensors.save_file(other, model / "other.safetensors")
    safetensors.save_file(other, model / "third.safetensors")
    with pytest.raises(errors.CheckpointFormatError, match="several"):
        flaxckpt.load(model)


def test_rejects_pickle_only_model_with_advice(model):
    (model / "model.safetensors").unlink()
    (model / "pytorch_model.bin").write_bytes(b"PK\x03\x04archive/data.pkl")
    words = ("pytorch_model.bin", "safetensors", "save_pretrained")
    with refused(*words, error=errors.CheckpointFormatError):
        maps.detect(model)
