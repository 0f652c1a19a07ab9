"""Maps from GGUF files, written as llama.cpp converts published models."""

import jax
import numpy as np
import pytest

import flaxckpt
from flaxckpt import errors, maps
from flaxckpt.transforms import remap

gguf = pytest.importorskip("gguf", reason="the package gguf is not installed")

LAYERS, HEADS, KV_HEADS, HEAD_DIM, WIDTH, HIDDEN, VOCABULARY = 3, 6, 2, 4, 24, 40, 131

ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
    "gemma": gguf.MODEL_ARCH.GEMMA,
    "gemma2": gguf.MODEL_ARCH.GEMMA2,
    "gemma3": gguf.MODEL_ARCH.GEMMA3,
}


def published(architecture, *, is_tied):
    """Returns random tensors under the names that Hugging Face publishes."""
    q, kv = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    layer = {
        "self_attn.q_proj.weight": (q, WIDTH),
        "self_attn.k_proj.weight": (kv, WIDTH),
        "self_attn.v_proj.weight": (kv, WIDTH),
        "self_attn.o_proj.weight": (WIDTH, q),
        "mlp.gate_proj.weight": (HIDDEN, WIDTH),
        "mlp.up_proj.weight": (HIDDEN, WIDTH),
        "mlp.down_proj.weight": (WIDTH, HIDDEN),
        "input_layernorm.weight": (WIDTH,),
        "post_attention_layernorm.weight": (WIDTH,),
    }
    if architecture == "qwen2":
        layer |= {
            f"self_attn.{c}_proj.bias": (n,)
            for c, n in zip("qkv", (q, kv, kv), strict=True)
        }
    if architecture in ("qwen3", "gemma3"):
        layer |= {f"self_attn.{c}_norm.weight": (HEAD_DIM,) for c in "qk"}
    if architecture in ("gemma2", "gemma3"):
        layer |= {
            f"{c}_feedforward_layernorm.weight": (WIDTH,) for c in ("pre", "post")
        }
    shapes = {"model.embed_tokens.weight": (VOCABULARY, WIDTH)}
    for i in range(LAYERS):
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in layer.items()}
    shapes["model.norm.weight"] = (WIDTH,)
    if not is_tied:
        shapes["lm_head.weight"] = (VOCABULARY, WIDTH)
    rng = np.random.default_rng(0)
    # Multiples of 1/64: adding and subtracting 1 is exact.
    return {
        name: (rng.integers(-64, 64, shape) / 64).astype(np.float32)
        for name, shape in shapes.items()
    }


def permute(x, heads):
    """Interleaves the rotary halves of each head, as llama.cpp stores Llama."""
    halves = x.reshape(heads, 2, x.shape[0] // heads // 2, *x.shape[1:])
    return halves.swapaxes(1, 2).reshape(x.shape)


def write(path, architecture, tensors, *, more=()):
    """Writes a GGUF file with the package of llama.cpp, under the names that it has."""
    known = ARCHITECTURES.get(architecture, gguf.MODEL_ARCH.LLAMA)
    names = gguf.get_tensor_name_map(known, LAYERS)
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(LAYERS)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(HIDDEN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(HEAD_DIM)
    for name, x in tensors.items():
        if architecture == "llama" and name.endswith(
            ("q_proj.weight", "k_proj.weight")
        ):
            x = permute(x, HEADS if "q_proj" in name else KV_HEADS)
        if architecture.startswith("gemma") and name.endswith("norm.weight"):
            x = x + np.float32(1)
        new = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert new is not None, name
        writer.add_tensor(new, x)
    for name, x in more:
        writer.add_tensor(name, x)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def flatten(tree):
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): np.asarray(leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


@pytest.mark.parametrize(
    ("architecture", "is_tied"),
    [(name, True) for name in ARCHITECTURES]
    + [(name, False) for name in ("llama", "qwen2", "qwen3", "gemma3")],
)
def test_restores_published_tensors(tmp_path, architecture, is_tied):
    tensors = published(architecture, is_tied=is_tied)
    write(tmp_path / "model.gguf", architecture, tensors)
    detected = maps.detect(tmp_path / "model.gguf")
    assert detected.family.name == architecture
    found = flatten(
        flaxckpt.load(tmp_path / "model.gguf", transforms=detected.transforms)
    )
    assert found.keys() == tensors.keys()
    for name, x in tensors.items():
        np.testing.assert_array_equal(found[name], x, err_msg=name)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("target", ["linen", "tunix", "maxtext", "maxtext-scanned"])
def test_fills_state_like_published_model(tmp_path, target):
    tensors = published("llama", is_tied=False)
    write(tmp_path / "model.gguf", "llama", tensors)
    np.savez(
        tmp_path / "model.npz", **{k.replace(".", "/"): v for k, v in tensors.items()}
    )
    config = maps.detect(tmp_path / "model.gguf").config
    changes = maps.llama(config, target=target)
    wanted = flaxckpt.load(tmp_path / "model.npz", transforms=changes)
    state = {"params": jax.tree.map(np.zeros_like, wanted)}
    found = flaxckpt.load(
        tmp_path / "model.gguf",
        state,
        transforms=maps.find(tmp_path / "model.gguf", state),
    )
    assert flatten(found["params"]).keys() == flatten(wanted).keys()
    jax.tree.map(np.testing.assert_array_equal, wanted, found["params"])


def test_omits_rope_factors_and_recognizes_llama_3(tmp_path):
    factors = [("rope_freqs.weight", np.ones(2, np.float32))]
    tensors = published("llama", is_tied=True)
    write(tmp_path / "model.gguf", "llama", tensors, more=factors)
    detected = maps.detect(tmp_path / "model.gguf")
    assert detected.config["rope_scaling"] == {"rope_type": "llama3"}
    found = flaxckpt.load(tmp_path / "model.gguf", transforms=detected.transforms)
    assert flatten(found).keys() == tensors.keys()


def test_error_names_unknown_architectures_and_tensors(tmp_path):
    tensors = published("llama", is_tied=True)
    more = [("blk.0.attn_sinks.weight", np.ones(2, np.float32))]
    write(tmp_path / "model.gguf", "llama", tensors, more=more)
    detected = maps.detect(tmp_path / "model.gguf")
    with pytest.raises(errors.OptionError, match="blk/0/attn_sinks/weight"):
        flaxckpt.load(tmp_path / "model.gguf", transforms=detected.transforms)
    writer = gguf.GGUFWriter(tmp_path / "other.gguf", "mamba")
    writer.add_tensor("token_embd.weight", np.ones((2, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(errors.OptionError, match="architecture 'mamba'"):
        maps.detect(tmp_path / "other.gguf")


def test_two_equal_containers_are_ambiguous(tmp_path):
    tensors = published("qwen3", is_tied=True)
    write(tmp_path / "model.gguf", "qwen3", tensors)
    config = maps.detect(tmp_path / "model.gguf").config
    np.savez(
        tmp_path / "model.npz", **{k.replace(".", "/"): v for k, v in tensors.items()}
    )
    changes = maps.qwen3(config, target="tunix")
    params = flaxckpt.load(tmp_path / "model.npz", transforms=changes)
    with pytest.raises(errors.OptionError, match="params and ema both have"):
        maps.find(tmp_path / "model.gguf", {"params": params, "ema": params})


def test_rejects_state_with_few_leaves_of_layout(tmp_path):
    write(tmp_path / "model.gguf", "llama", published("llama", is_tied=True))
    state = {
        "embedder": {"input_embedding": np.zeros((VOCABULARY, WIDTH), np.float32)},
        "layers": [{"attention": np.zeros((WIDTH, WIDTH), np.float32)}],
    }
    with pytest.raises(errors.OptionError) as caught:
        maps.find(tmp_path / "model.gguf", state)
    assert "tunix: fits 1 of 29 leaves" in str(caught.value)


# ---- suggest ------------------------------------------------------------------------


def write_npz(path, tensors):
    np.savez(path, **{name.replace(".", "/"): x for name, x in tensors.items()})
    return path


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("architecture", "target"),
    [
        (name, target)
        for name in ARCHITECTURES
        for target in ("linen", "tunix")
        if target in getattr(maps, name).targets
    ],
)
def test_suggest_finds_published_values(tmp_path, architecture, target):
    tensors = published(architecture, is_tied=True)
    write(tmp_path / "model.gguf", architecture, tensors)
    plain = write_npz(tmp_path / "model.npz", tensors)
    config = maps.detect(tmp_path / "model.gguf").config
    changes = getattr(maps, architecture)(config, target=target, prefix="params")
    wanted = flaxckpt.load(plain, transforms=changes)
    suggestion = flaxckpt.suggest(tmp_path / "model.gguf", wanted)
    assert suggestion.gguf == str(tmp_path / "model.gguf")
    assert not suggestion.left
    names = {}
    exec(suggestion.code, names)
    for transforms in (suggestion.accept().transforms, names["transforms"]):
        found = flaxckpt.load(tmp_path / "model.gguf", wanted, transforms=transforms)
        jax.tree.map(np.testing.assert_array_equal, wanted, found)


def test_suggest_applies_transforms_of_detect_once(tmp_path):
    tensors = published("llama", is_tied=False)
    write(tmp_path / "model.gguf", "llama", tensors)
    detected = maps.detect(tmp_path / "model.gguf")
    wanted = {"w": tensors["model.layers.1.self_attn.q_proj.weight"]}
    row = remap([("model/layers/1/self_attn/q_proj/weight", "w")])
    for given in ([row], [*detected.transforms, row]):
        suggestion = flaxckpt.suggest(tmp_path / "model.gguf", wanted, transforms=given)
        found = flaxckpt.load(
            tmp_path / "model.gguf",
            wanted,
            transforms=suggestion.transforms,
            unused="ignore",
        )
        np.testing.assert_array_equal(found["w"], wanted["w"])


def test_suggest_keeps_names_of_llama_cpp(tmp_path):
    tensors = published("llama", is_tied=True)
    write(tmp_path / "model.gguf", "llama", tensors)
    wanted = {"params": flaxckpt.load(tmp_path / "model.gguf")}
    suggestion = flaxckpt.suggest(tmp_path / "model.gguf", wanted)
    assert suggestion.gguf is None
    found = flaxckpt.load(
        tmp_path / "model.gguf", wanted, transforms=suggestion.transforms
    )
    jax.tree.map(np.testing.assert_array_equal, wanted, found)


@pytest.mark.parametrize("architecture", ["other", "llama"])
def test_suggest_asks_about_files_without_a_map(tmp_path, architecture):
    """A file of an unknown architecture, and one with a tensor that no map has."""
    more = [("blk.0.attn_sinks.weight", np.ones(2, np.float32))]
    write(
        tmp_path / "model.gguf",
        architecture,
        published("llama", is_tied=True),
        more=more if architecture == "llama" else (),
    )
    wanted = {"embed": {"embedding": np.zeros((VOCABULARY, WIDTH), np.float32)}}
    suggestion = flaxckpt.suggest(tmp_path / "model.gguf", wanted)
    [ambiguity] = suggestion.ambiguous
    assert ambiguity.leaves == ("embed/embedding",)
    assert "stores some tensors with other values than were published" in str(ambiguity)
    about = "'other'" if architecture == "other" else "attn_sinks"
    assert about in ambiguity.reason
    with pytest.raises(errors.OptionError, match="1 choice is ambiguous"):
        _ = suggestion.transforms
    found = flaxckpt.load(
        tmp_path / "model.gguf",
        wanted,
        transforms=suggestion.accept().transforms,
        unused="ignore",
    )
    assert found["embed"]["embedding"].any()
