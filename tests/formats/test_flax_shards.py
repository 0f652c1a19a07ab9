"""Flax models in several msgpack files, as transformers writes them, and their keys."""

import json
import logging

import jax
import numpy as np
import pytest
from flax import serialization, traverse_util
from flax.core import freeze

import flaxckpt
from flaxckpt import errors

INDEX = "flax_model.msgpack.index.json"


def model():
    rng = np.random.default_rng(0)
    return {
        "transformer": {
            "h": {
                str(i): {
                    "kernel": rng.normal(size=(3, 4)).astype("f4"),
                    "scale": rng.normal(size=4).astype("f2"),
                }
                for i in range(3)
            },
            "wte": {"embedding": rng.normal(size=(7, 3)).astype("f4")},
        }
    }


def write(directory, params, shards=3):
    """Writes a model as `save_pretrained` of transformers does."""
    directory.mkdir()
    flat = traverse_util.flatten_dict(params, sep="/")
    weight_map = {}
    for at in range(shards):
        name = f"flax_model-{at + 1:05}-of-{shards:05}.msgpack"
        part = {path: flat[path] for path in [*flat][at::shards]}
        weight_map |= dict.fromkeys(part, name)
        tree = traverse_util.unflatten_dict(part, sep="/")
        (directory / name).write_bytes(serialization.to_bytes(tree))
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (directory / INDEX).write_text(json.dumps(index))
    (directory / "config.json").write_text("{}")
    return directory


def check(found, wanted):
    jax.tree.map(np.testing.assert_array_equal, found, wanted)


@pytest.mark.parametrize("wrap", [dict, freeze])
@pytest.mark.parametrize("name", ["", INDEX])
def test_shards_with_index_form_one_model(tmp_path, wrap, name):
    wanted = wrap(model())
    path = write(tmp_path / "model", model()) / name
    check(flaxckpt.load(path, wanted), wanted)
    assert flaxckpt.load(path)["transformer"]["wte"].keys() == {"embedding"}
    assert flaxckpt.metadata(path).format == "msgpack"
    assert flaxckpt.verify(path).ok


def test_converts_shards(tmp_path):
    source = write(tmp_path / "model", model())
    flaxckpt.convert(source, tmp_path / "one.safetensors")
    check(flaxckpt.load(tmp_path / "one.safetensors", model()), model())


def test_single_shard_warns_and_names_index(tmp_path, caplog):
    source = write(tmp_path / "model", model())
    with caplog.at_level(logging.WARNING):
        flaxckpt.load(source / "flax_model-00001-of-00003.msgpack")
    assert "one of several shards" in caplog.text
    assert INDEX in caplog.text


@pytest.mark.parametrize("left", [1, 2, 3])
def test_rejects_shards_without_index(tmp_path, caplog, left):
    source = write(tmp_path / "model", model())
    (source / INDEX).unlink()
    for at in range(left + 1, 4):
        (source / f"flax_model-{at:05}-of-00003.msgpack").unlink()
    count = "holds 3 shards" if left == 3 else f"holds {left} of 3 shards"
    with pytest.raises(errors.DamagedCheckpointError, match=count) as caught:
        flaxckpt.load(source)
    assert INDEX in str(caught.value)
    assert ("00003-of-00003" in str(caught.value)) == (left < 3)
    flaxckpt.load(source / "flax_model-00001-of-00003.msgpack")
    assert "one of several shards; the others are not read" in caplog.text
    assert INDEX not in caplog.text


def test_rejects_ambiguous_indices(tmp_path):
    source = write(tmp_path / "model", model())
    (source / f"other_{INDEX}").write_text((source / INDEX).read_text())
    with pytest.raises(errors.CheckpointFormatError, match=r"msgpack indices.*one$"):
        flaxckpt.load(source)


def test_error_names_missing_shard(tmp_path):
    source = write(tmp_path / "model", model())
    (source / "flax_model-00002-of-00003.msgpack").unlink()
    with pytest.raises(errors.DamagedCheckpointError, match=r"00002.*it is missing"):
        flaxckpt.load(source)


def test_rejects_mismatched_index(tmp_path):
    source = write(tmp_path / "model", model())
    index = json.loads((source / INDEX).read_text())
    index["weight_map"]["transformer/other"] = "flax_model-00001-of-00003.msgpack"
    (source / INDEX).write_text(json.dumps(index))
    with pytest.raises(errors.DamagedCheckpointError, match="transformer/other"):
        flaxckpt.load(source)
    index["weight_map"]["transformer/other"] = "../flax_model-00001-of-00003.msgpack"
    (source / INDEX).write_text(json.dumps(index))
    with pytest.raises(errors.DamagedCheckpointError, match="beside the index"):
        flaxckpt.load(source)


@pytest.mark.parametrize("numbers", [(0, 1), (1, 5), (-1, 300, 70_000)])
def test_reads_integer_keys(tmp_path, numbers):
    state = {number: {"w": np.arange(3.0) + number} for number in numbers}
    file = tmp_path / "model.msgpack"
    file.write_bytes(serialization.to_bytes(state))
    check(flaxckpt.load(file, state), state)
    assert flaxckpt.metadata(file).leaves.keys() == {f"{n}/w" for n in numbers}


def test_rejects_keys_equal_as_text(tmp_path):
    file = tmp_path / "model.msgpack"
    file.write_bytes(b"\x82\xa11\x03\x01\x02")  # {"1": 3, 1: 2}
    with pytest.raises(errors.DamagedCheckpointError, match="second time"):
        flaxckpt.load(file)
