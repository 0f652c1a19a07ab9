"""Tables of decoders: blocks of layers, rows of configurations, padded vocabularies."""

import numpy as np
import pytest

import flaxckpt
from flaxckpt import errors, maps
from flaxckpt.transforms import grow, inverse
from tests.helpers import published
from tests.maps.leaves import nest

SIZES = {
    "hidden_size": 6,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 4,
}


def gemma(layers):
    """Returns the tensors of Gemma 3; those of Gemma 2 are the same, less two norms."""
    norms = ("input", "post_attention", "pre_feedforward", "post_feedforward")
    more = ("q_norm", "k_norm")
    tensors = published.decoder_tensors(layers, norms=norms, more=more)
    return nest({name.replace(".", "/"): value for name, value in tensors.items()})


@pytest.mark.slow
@pytest.mark.parametrize("layers", [1, 5, 6, 7, 12, 14])
def test_gemma_3_scans_layers_in_blocks_of_six(tmp_path, layers):
    state = gemma(layers)
    flaxckpt.save(tmp_path / "published", state)
    config = {**SIZES, "num_hidden_layers": layers}
    changes = maps.gemma3(config, target="maxtext-scanned")
    decoder = flaxckpt.load(tmp_path / "published", transforms=changes)["decoder"]
    up = [layer["mlp"]["up_proj"]["weight"].T for layer in state_layers(state)]
    whole = layers // 6 * 6
    for r in range(6 if whole else 0):
        found = decoder["layers"][f"layers_{r}"]["mlp"]["wi_1"]["kernel"]
        np.testing.assert_array_equal(found, np.stack(up[r:whole:6], axis=1))
    for r in range(layers % 6):
        found = decoder["layers_remainder"][f"layers_{r}"]["mlp"]["wi_1"]["kernel"]
        np.testing.assert_array_equal(found, up[whole + r])
    assert ("layers" in decoder) == (whole > 0)
    assert ("layers_remainder" in decoder) == (layers % 6 > 0)

    flaxckpt.save(tmp_path / "own", state, transforms=changes)
    back = flaxckpt.load(tmp_path / "own", transforms=inverse(changes))
    for old, new in zip(state_layers(state), state_layers(back), strict=True):
        kernels = (old["self_attn"]["o_proj"], new["self_attn"]["o_proj"])
        np.testing.assert_array_equal(*(kernel["weight"] for kernel in kernels))


def state_layers(state):
    layers = state["model"]["layers"]
    return [layers[str(i)] for i in range(len(layers))]


def test_gemma_2_rejects_odd_layer_count():
    config = {**SIZES, "num_hidden_layers": 3}
    with pytest.raises(errors.OptionError, match="3 of the config is not divisible"):
        maps.gemma2(config, target="maxtext")


def test_grow_pads_vocabularies(tmp_path):
    flaxckpt.save(tmp_path / "published", gemma(2))
    config = {**SIZES, "num_hidden_layers": 2}
    changes = [
        *maps.gemma3(config, target="maxtext"),
        grow("token_embedder/embedding", 0, 16, init="zeros"),
    ]
    state = flaxckpt.load(tmp_path / "published", transforms=changes)
    embedding = state["token_embedder"]["embedding"]
    assert embedding.shape == (16, 6)
    assert embedding[:11].any()
    assert not embedding[11:].any()


@pytest.mark.parametrize("rope_type", [None, "llama3"])
def test_maxtext_interleaves_llama_3_1_keys(rope_type):
    scaling = rope_type and {"rope_type": rope_type}
    config = {**SIZES, "num_hidden_layers": 2, "rope_scaling": scaling}
    [checked, _] = maps.llama(config, target="maxtext")
    rules = checked.remap.rules
    forms = [rule.row.form for rule in rules if "k_proj" in rule.row.source]
    interleaved = "(k two p) e -> e k (p two)"
    assert forms == [interleaved if rope_type else "(k d) e -> e k d"]
