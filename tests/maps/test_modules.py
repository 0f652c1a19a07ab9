"""Families made of modules, on arrays that are named as published models name them."""

import fnmatch
import itertools
import re

import numpy as np
import pytest

import flaxckpt
from flaxckpt import errors, maps
from flaxckpt.transforms import inverse
from tests.maps.leaves import flatten

safetensors = pytest.importorskip("safetensors.numpy", reason="needs safetensors")

CONFIGS = {
    "bert": {"num_hidden_layers": 2},
    "gpt2": {"n_layer": 2},
    "roberta": {"num_hidden_layers": 2, "tie_word_embeddings": False},
    "t5": {"num_layers": 2, "num_decoder_layers": 1, "feed_forward_proj": "gated-gelu"},
    "vit": {"num_hidden_layers": 2, "num_attention_heads": 3, "hidden_size": 6},
    "clip": {"text_config": {"num_hidden_layers": 2}, "vision_config": {}},
    "whisper": {
        "encoder_layers": 2,
        "decoder_layers": 1,
        "encoder_attention_heads": 3,
        "d_model": 6,
    },
}
PAIRS = [(name, target) for name in CONFIGS for target in getattr(maps, name).targets]


INDEX = re.compile(r"\{(\w+)(?::(.*?))?\}")


def size_of(config, rule):
    """Returns a size as a rule of a family says it; 6 if the configuration lacks it."""
    for choice in rule.split("|"):
        text = re.sub(r"[a-z][\w.]*", lambda key: str(find(config, key[0])), choice)
        if "None" not in text:
            return int(eval(text))  # numbers and operators
    return 6


def find(config, key):
    """Returns the value of a key with dots, or None."""
    for part in key.split("."):
        config = (config or {}).get(part)
    return config


def holds(config, condition):
    """Returns True if all parts of the condition of a row hold."""
    for part in filter(None, condition.split(" and ")):
        key, _, pattern = part.removeprefix("not ").partition("=")
        value = config.get(key)
        is_so = fnmatch.fnmatchcase(str(value), pattern) if pattern else bool(value)
        if is_so == part.startswith("not "):
            return False
    return True


def publish(directory, name, target):
    """Saves random tensors for all rows, by their names; returns them."""
    family = getattr(maps, name)
    config = {**family.defaults, **CONFIGS[name]}
    rng = np.random.default_rng(0)
    stated = {
        INDEX.sub(lambda index: f"({index[2] or '[0-9]+'})", row): axes
        for row, axes in family.shapes.items()
    }
    tensors = {}
    for row in family.tables[target]:
        if not holds(config, row.when):
            continue
        axes = re.sub(r"\(.*?\)|\w+", "x", (row.form or "x").partition(" ->")[0])
        indices = dict(INDEX.findall(row.source))
        values = (
            words.split("|") if words else range(size_of(config, family.sizes[axis]))
            for axis, words in indices.items()
        )
        for chosen in itertools.product(*values):
            at = dict(zip(indices, chosen, strict=True))
            path = INDEX.sub(lambda index, at=at: str(at[index[1]]), row.source)
            shape = [6] * len(axes.split())
            for pattern, sizes in stated.items():
                if re.fullmatch(pattern, path):
                    shape = [size_of(config, size) for size in sizes.split()]
                    break
            tensors[path] = rng.normal(size=shape).astype(np.float32)
    safetensors.save_file(tensors, directory / "model.safetensors")
    return tensors


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("name", "target"), PAIRS)
def test_each_tensor_has_one_place_and_round_trips(tmp_path, name, target):
    tensors = publish(tmp_path, name, target)
    changes = getattr(maps, name)(CONFIGS[name], target=target, prefix="params")
    mapped = flaxckpt.load(tmp_path / "model.safetensors", transforms=changes)
    assert list(mapped) == ["params"]
    assert len(flatten(mapped)) == len(tensors)
    flaxckpt.save(tmp_path / "own", mapped)
    back = flatten(flaxckpt.load(tmp_path / "own", transforms=inverse(changes)))
    wanted = {path.replace(".", "/"): leaf for path, leaf in tensors.items()}
    assert sorted(back) == sorted(wanted)
    assert all((back[path] == leaf).all() for path, leaf in wanted.items())


@pytest.mark.parametrize("name", ["bert", "roberta"])
def test_reads_old_names_of_norms(tmp_path, name):
    tensors = publish(tmp_path, name, "linen")
    changes = getattr(maps, name)(CONFIGS[name], target="linen")
    wanted = flatten(flaxckpt.load(tmp_path / "model.safetensors", transforms=changes))
    old = {
        re.sub("LayerNorm.weight$", "LayerNorm.gamma", path).replace(
            "LayerNorm.bias", "LayerNorm.beta"
        ): leaf
        for path, leaf in tensors.items()
    }
    assert len(old.keys() - tensors.keys()) >= 6
    safetensors.save_file(old, tmp_path / "old.safetensors")
    found = flaxckpt.load(tmp_path / "old.safetensors", transforms=changes)
    assert sorted(wanted) == sorted(flatten(found))
    assert all((flatten(found)[path] == leaf).all() for path, leaf in wanted.items())
    flaxckpt.save(tmp_path / "own", found)
    back = flaxckpt.load(tmp_path / "own", transforms=inverse(changes))
    assert sorted(flatten(back)) == sorted(path.replace(".", "/") for path in tensors)


def test_does_not_publish_leaves_without_effect_on_outputs(tmp_path):
    publish(tmp_path, "whisper", "bonsai")
    changes = maps.whisper(CONFIGS["whisper"], target="bonsai", prefix="model")
    mapped = flaxckpt.load(tmp_path / "model.safetensors", transforms=changes)
    wanted = flaxckpt.load(tmp_path / "model.safetensors")
    attention = mapped["model"]["encoder"]["layers"]["1"]["self_attn"]
    attention["key"]["bias"] = np.ones((3, 2), np.float32)
    flaxckpt.save(tmp_path / "own", mapped)
    back = flaxckpt.load(tmp_path / "own", transforms=inverse(changes))
    assert sorted(flatten(back)) == sorted(flatten(wanted))

    attention["query"]["offset"] = np.ones((3, 2), np.float32)
    flaxckpt.save(tmp_path / "other", mapped)
    with pytest.raises(errors.OptionError, match="query/offset"):
        flaxckpt.load(tmp_path / "other", transforms=inverse(changes))


def test_partial_model_has_fewer_rows(tmp_path):
    """Decoders are wanted only where a configuration has them."""
    publish(tmp_path, "t5", "linen")
    tensors = flatten(flaxckpt.load(tmp_path / "model.safetensors"))
    encoder = {
        path.replace("/", "."): leaf
        for path, leaf in tensors.items()
        if not path.startswith("decoder/")
    }
    safetensors.save_file(encoder, tmp_path / "encoder.safetensors")
    config = {**CONFIGS["t5"], "architectures": ["T5EncoderModel"]}
    changes = maps.t5(config, target="linen")
    found = flaxckpt.load(tmp_path / "encoder.safetensors", transforms=changes)
    assert sorted(found) == ["encoder", "shared"]
    with pytest.raises(errors.OptionError, match="leaves are missing"):
        flaxckpt.load(
            tmp_path / "encoder.safetensors",
            transforms=maps.t5(CONFIGS["t5"], target="linen"),
        )
    why = "decoder/.*: a T5EncoderModel has no such leaf\n"
    with pytest.raises(errors.OptionError, match=why):
        flaxckpt.load(tmp_path / "model.safetensors", transforms=changes)


@pytest.mark.parametrize(("name", "target"), PAIRS)
def test_rejects_head_missing_in_family(tmp_path, name, target):
    publish(tmp_path, name, target)
    config = {"model_type": getattr(maps, name).model_types[0], **CONFIGS[name]}
    changes = getattr(maps, name)(config, target=target, prefix="params")
    state = flaxckpt.load(tmp_path / "model.safetensors", transforms=changes)
    flaxckpt.save(tmp_path / "own", state)
    config["architectures"] = ["ModelForSpanPrediction"]
    with pytest.raises(errors.OptionError, match="has no head ForSpanPrediction"):
        flaxckpt.export_huggingface(
            tmp_path / "own", tmp_path / "out", config=config, target=target
        )
