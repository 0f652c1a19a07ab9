"""Published models on the command line: to a layout, and back."""

import jax
import numpy as np
import pytest
from safetensors import numpy as safetensors

import flaxckpt
from flaxckpt import maps
from tests.helpers import hub_cache, published


@pytest.fixture
def model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return published.write_llama(tmp_path / "published").name


def assert_published(directory, dtype=np.float32):
    found = safetensors.load_file(directory / "model.safetensors")
    wanted = published.llama_tensors()
    assert found.keys() == wanted.keys()
    for name, array in wanted.items():
        np.testing.assert_array_equal(found[name], array.astype(dtype), name)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["auto", "llama"])
def test_model_converts_to_layout_and_back(tmp_path, model, command, name):
    command(
        *("convert", model, "flax", "--map", name),
        *("--target", "tunix", "--prefix", "params"),
    )
    changes = maps.llama(model, target="tunix", prefix="params")
    jax.tree.map(
        np.testing.assert_array_equal,
        flaxckpt.load("flax"),
        flaxckpt.load(model, transforms=changes),
    )
    back = ("convert", "flax", "back", "--to", "huggingface", "--tokenizer", model)
    [line] = command.text(*back, "--map", name, "--target", "tunix")
    assert line.startswith("wrote back: ")
    assert_published(tmp_path / "back")
    assert sorted(path.name for path in (tmp_path / "back").iterdir()) == [
        *("config.json", "generation_config.json"),
        *("model.safetensors", "tokenizer.json"),
    ]
    found = command.json(*back, "--overwrite", "--cast", ".*=float16")
    assert found["path"] == str(tmp_path / "back")
    assert_published(tmp_path / "back", np.float16)


def test_renames_apply_after_map_and_before_export(tmp_path, model, command):
    command(
        *("convert", model, "flax", "--map", "auto", "--target", "linen"),
        *("--rename", r"model/(.*)=inner/\1"),
    )
    assert flaxckpt.load("flax").keys() == {"inner", "lm_head"}
    command(
        *("convert", "flax", "back", "-f", "huggingface", "--config", model),
        *("--rename", r"inner/(.*)=model/\1"),
    )
    assert_published(tmp_path / "back")


def test_convert_accepts_run_and_cached_model(tmp_path, model, command):
    files = {path.name: path for path in (tmp_path / model).iterdir()}
    cached = hub_cache.write_model(tmp_path, files).name
    changes = maps.llama(cached, target="linen", prefix="params")
    with flaxckpt.Checkpointer("run") as checkpointer:
        checkpointer.save(3, flaxckpt.load(cached, transforms=changes))
    command("convert", "run", "back", "--to", "huggingface", "--config", cached)
    assert_published(tmp_path / "back")
    command("convert", cached, "flax", "--map", "auto", "--target", "linen")
    assert "model/norm/weight" in flaxckpt.metadata("flax").leaves


def test_rejects_options_without_effect(model, command):
    for options, message in (
        (["--config", model], "--config has an effect only with --to huggingface"),
        (["--tokenizer", model], "--tokenizer has an effect only with --to hugging"),
        (["--target", "linen"], "--target has an effect only with --map"),
        (["--prefix", "params"], "--prefix has an effect only with --map"),
        (["--to", "huggingface", "--items", "a"], "--items has an effect only without"),
        (["--map", "lama"], "must be 'auto' or one of"),
        (["--map", "llama"], "needs a target: one of linen"),
        (["--map", "llama", "--target", "x"], "has no target 'x'"),
        (["--to", "huggingface"], "needs the config"),
    ):
        assert message in command.refuses("convert", model, "out", *options)


def test_plan_starts_from_published_model(tmp_path, model, command):
    command(
        *("convert", model, "flax", "--map", "auto"),
        *("--target", "maxtext-scanned", "--prefix", "params"),
    )
    for name in ("auto", "llama"):
        found = command.json("plan", model, "flax", "--map", name)
        assert found["ok"]
        assert found["bytes_to_read"] == sum(
            array.nbytes for array in published.llama_tensors().values()
        )
    assert not command.json("plan", model, "flax", code=1)["ok"]
    asked = ["--map", "auto", "--rename", r"params/(.*)=other/\1"]
    assert not command.json("plan", model, "flax", *asked, code=1)["ok"]
    refused = command.refuses("plan", model, "flax", "--map", "gpt2")
    assert "not of maps.gpt2" in refused
