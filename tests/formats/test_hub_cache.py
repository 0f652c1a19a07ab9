"""Models in the cache of the Hugging Face Hub, and links that lead out of it."""

import json
import os
import shutil

import jax
import numpy as np
import pytest
from safetensors import numpy as safetensors

import flaxckpt
import tests
from flaxckpt import errors
from tests.helpers import hub_cache

GOLDEN = tests.GOLDEN / "safetensors"
SILERO = GOLDEN / "silero_vad_16k.safetensors"
OTHERS = {
    "config.json": b"{}",
    "tokenizer.json": b"{}",
    "pytorch_model.bin": b"PK\x03\x04",
    "onnx/model.onnx": b"x",
}


def assert_silero(found):
    wanted = safetensors.load_file(SILERO)
    flat, _ = jax.tree_util.tree_flatten_with_path(found)
    arrays = {".".join(key.key for key in path): leaf for path, leaf in flat}
    assert arrays.keys() == wanted.keys()
    for name, array in wanted.items():
        np.testing.assert_array_equal(arrays[name], array, name)


@pytest.mark.slow
def test_model_resolves_to_main_snapshot(tmp_path):
    model = hub_cache.write_model(tmp_path, {"model.safetensors": SILERO, **OTHERS})
    hub_cache.write_model(tmp_path, {"model.safetensors": b"other"}, revision="old")
    (model / "refs/main").write_text(hub_cache.REVISION)
    snapshot = model / "snapshots" / hub_cache.REVISION
    for path in (model, snapshot, snapshot / "model.safetensors"):
        assert_silero(flaxckpt.load(path))
        assert flaxckpt.verify(path).ok
    assert flaxckpt.metadata(model).path == str(snapshot)
    assert flaxckpt.formats.detect(model).format == "safetensors"
    flaxckpt.convert(model, tmp_path / "native")
    assert_silero(flaxckpt.load(tmp_path / "native"))


def test_reads_sharded_model(tmp_path):
    files = {path.name: path for path in (GOLDEN / "sharded").iterdir()}
    model = hub_cache.write_model(tmp_path, files)
    found, wanted = flaxckpt.load(model), flaxckpt.load(GOLDEN / "sharded")
    jax.tree.map(np.testing.assert_array_equal, found, wanted)


def test_reads_subdirectories_of_snapshot(tmp_path):
    model = hub_cache.write_model(tmp_path, {"unet/deep/model.safetensors": SILERO})
    unet = model / "snapshots" / hub_cache.REVISION / "unet/deep"
    assert_silero(flaxckpt.load(unet))
    (tmp_path / "link").symlink_to(unet)
    assert_silero(flaxckpt.load(tmp_path / "link"))


def make_outside(root):
    """Files beside a model that no link may reach."""
    shutil.copy(SILERO, root / "other.safetensors")
    other = hub_cache.write_model(root / "2", {"model.safetensors": SILERO})
    (root / "2" / "models--org--other").symlink_to(other)
    return [
        root / "other.safetensors",
        next((other / "blobs").iterdir()),
        other / "snapshots" / hub_cache.REVISION / "model.safetensors",
        root / "2/models--org--other/blobs" / next((other / "blobs").iterdir()).name,
    ]


@pytest.mark.parametrize("number", range(4))
def test_rejects_links_out_of_model(tmp_path, number):
    target = make_outside(tmp_path)[number]
    model = hub_cache.write_model(tmp_path / "1", {"config.json": b"{}"})
    snapshot = model / "snapshots" / hub_cache.REVISION
    link = snapshot / "model.safetensors"
    for to in (target, os.path.relpath(target, snapshot), "../../blobs/hidden"):
        link.unlink(missing_ok=True)
        if to == "../../blobs/hidden":
            (model / "blobs/hidden").symlink_to(target)
        link.symlink_to(to)
        with pytest.raises(errors.DamagedCheckpointError, match="outside of its"):
            flaxckpt.load(model)


def test_rejects_links_to_model_files_other_than_blobs(tmp_path):
    model = hub_cache.write_model(tmp_path, {"config.json": b"{}"})
    shutil.copy(SILERO, model / "refs/secret")
    (model / "blobs/deep").mkdir()
    shutil.copy(SILERO, model / "blobs/deep/secret")
    link = model / "snapshots" / hub_cache.REVISION / "model.safetensors"
    for target in ("../../refs/secret", "../../blobs/deep/secret"):
        link.unlink(missing_ok=True)
        link.symlink_to(target)
        with pytest.raises(errors.DamagedCheckpointError, match="outside of its"):
            flaxckpt.load(model)


def test_rejects_symlinked_blobs_directory(tmp_path):
    model = hub_cache.write_model(tmp_path, {"model.safetensors": SILERO})
    (model / "blobs").rename(tmp_path / "elsewhere")
    (model / "blobs").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(errors.DamagedCheckpointError, match="outside of its"):
        flaxckpt.load(model)


def test_rejects_blobs_directory_outside_hub_cache(tmp_path):
    """Only `models--*` are caches: any archive may have a directory `blobs`."""
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "abc"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    shutil.copy(SILERO, blobs / "0123")
    (snapshot / "model.safetensors").symlink_to("../../blobs/0123")
    with pytest.raises(errors.DamagedCheckpointError, match="outside of its"):
        flaxckpt.load(snapshot)


def test_rejects_shard_linked_out_of_model(tmp_path):
    index = json.dumps({"weight_map": {"a": "model-1.safetensors"}}).encode()
    model = hub_cache.write_model(tmp_path, {"model.safetensors.index.json": index})
    safetensors.save_file({"a": np.zeros(2)}, tmp_path / "secret")
    shard = model / "snapshots" / hub_cache.REVISION / "model-1.safetensors"
    shard.symlink_to(tmp_path / "secret")
    with pytest.raises(errors.DamagedCheckpointError, match="outside of its"):
        flaxckpt.load(model)


@pytest.mark.parametrize(
    "content",
    ["", "..", "../..", "/etc", "missing", "a/b", "é", "x" * 5000, "a\0b", "a\nb"],
)
def test_rejects_reference_without_snapshot(tmp_path, content):
    model = hub_cache.write_model(tmp_path, {"model.safetensors": SILERO})
    (model / "refs/main").write_text(content)
    with pytest.raises(errors.CheckpointFormatError, match=f"pass .*{'0123456789'}"):
        flaxckpt.load(model)


@pytest.mark.parametrize("which", ["refs/main", "snapshots", "snapshot"])
def test_rejects_reference_or_snapshot_linked_elsewhere(tmp_path, which):
    model = hub_cache.write_model(tmp_path / "1", {"model.safetensors": SILERO})
    other = hub_cache.write_model(tmp_path / "2", {"model.safetensors": SILERO})
    name = f"snapshots/{hub_cache.REVISION}" if which == "snapshot" else which
    if (model / name).is_dir():
        shutil.rmtree(model / name)
    else:
        (model / name).unlink()
    (model / name).symlink_to(other / name)
    with pytest.raises(errors.CheckpointFormatError, match="names no snapshot"):
        flaxckpt.load(model)


def test_pipe_as_reference_does_not_block(tmp_path):
    model = hub_cache.write_model(tmp_path, {"model.safetensors": SILERO})
    (model / "refs/main").unlink()
    os.mkfifo(model / "refs/main")
    with pytest.raises(errors.CheckpointFormatError, match="names no snapshot"):
        flaxckpt.load(model)


def test_error_names_files_of_model_without_safetensors(tmp_path):
    model = hub_cache.write_model(tmp_path, OTHERS)
    with pytest.raises(errors.CheckpointFormatError, match=r"pytorch_model\.bin"):
        flaxckpt.load(model)


def test_reads_steps_in_directory_named_like_model(tmp_path):
    run = tmp_path / "models--my--run"
    (run / "snapshots").mkdir(parents=True)
    with flaxckpt.Checkpointer(run) as checkpointer:
        checkpointer.save(3, {"w": np.ones(2)})
    assert flaxckpt.metadata(run).step == 3
