"""Every verb works on a run of Orbax with several items in each step."""

import jax.numpy as jnp
import orbax.checkpoint as ocp
import pytest

import flaxckpt


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with ocp.CheckpointManager(tmp_path / "run") as manager:
        for step in (1, 2):
            items = {
                "params": ocp.args.StandardSave({"w": jnp.full(3, step)}),
                "optimizer": ocp.args.StandardSave({"mu": jnp.ones(3)}),
                "config": ocp.args.JsonSave({"lang": "en"}),
            }
            manager.save(step, args=ocp.args.Composite(**items))
    return tmp_path / "run"


LEAVES = {"params/w", "optimizer/mu"}


def test_read_only_verbs_support_items(run, command):
    assert [step["format"] for step in command.json("ls", run)["steps"]] == [
        "orbax"
    ] * 2
    assert set(command.json("show", run)["leaves"]) == LEAVES
    assert any(
        "params, optimizer" in line or "optimizer, params" in line
        for line in command.text("show", run)
    )
    [changed] = command.json("diff", run / "1", run / "2", code=1)["changed"]
    assert changed == "params/w"
    assert command.json("verify", run)["ok"]
    command("du", run)
    command("doctor", run)
    command("report", run, "-o", "report.html")


def test_modifying_verbs_support_items(run, command):
    command("pin", run, 1)
    command("unpin", run, 1)
    command("convert", run, "converted")
    assert flaxckpt.metadata("converted").json == {"config": {"lang": "en"}}
    command("prune", run, "--keep", "latest:1", "--yes")
    assert flaxckpt.Checkpointer(run, read_only=True).steps() == [2]


def test_convert_splits_and_joins_items(run, command):
    flaxckpt.save("both", {"params": {"w": jnp.ones(3)}, "ema": {"w": jnp.zeros(3)}})
    command("convert", "both", "apart", "--items", "params,ema")
    assert flaxckpt.metadata("apart").items == ("params", "ema")
    command("convert", "apart", "kept")
    assert flaxckpt.metadata("kept").items == ("params", "ema")
    command("convert", "apart", "joined", "--items", "default")
    assert flaxckpt.metadata("joined").items == ("default",)
    refusal = command.refuses("convert", "apart", "no", "--items", "params,x")
    assert "x: is an item, but not a branch" in refusal
