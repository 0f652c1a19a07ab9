"""Verbs that only read: text, JSON and exit codes."""

import json
import os
import shlex
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from click.testing import CliRunner
from flax.training.train_state import TrainState

import flaxckpt
from flaxckpt import errors
from flaxckpt.cli import app
from flaxckpt.policies import BestN, LatestN
from tests import GOLDEN
from tests.helpers import chunks, old_stores, run_files
from tests.helpers.files import largest_file


def damage(directory):
    """Changes one bit of an array in a step."""
    chunks.flip(directory / "state", "params.dense.kernel/c.0.0")


# ---- ls -----------------------------------------------------------------------------


def test_ls_lists_steps_with_sizes_metrics_and_marks(here, command):
    command("pin", "run", 100)
    header, *rows, last = command.text("ls", "run")
    assert header.split() == ["step", "saved", "size", "loss", "marks"]
    assert [row.split()[0] for row in rows] == ["100", "200", "300"]
    assert rows[0].split()[-2:] == ["3", "pinned"]
    assert rows[2].split()[-2:] == ["2", "latest"]
    assert last.startswith("3 steps, flaxckpt, ")


def test_ls_lists_steps_in_json(here, command):
    found = command.json("ls", "run")
    assert found["is_run"]
    assert found["path"] == str(here / "run")
    first, _, last = found["steps"]
    assert (first["step"], first["format"], first["metrics"]) == (
        100,
        "flaxckpt",
        {"loss": 3.0},
    )
    assert last["marks"] == ["latest"]
    assert found["bytes"] == sum(step["bytes"] for step in found["steps"])


def test_ls_marks_best_step_and_reports_why_each_stays(here, command):
    policies = ["--keep", "latest:1", "-k", "best:1:loss:min"]
    best = command.json("ls", "run", *policies)["steps"][1]
    assert best["marks"] == ["best"]
    assert best["why"] == ["BestN(1, 'loss', 'min')"]
    rows = command.text("ls", "run", *policies)
    assert rows[1].endswith("  to be deleted")
    assert rows[2].endswith("  best")
    assert rows[3].endswith("  latest, latest 1")


def test_ls_and_explain_detect_truncated_newest_step(here, command):
    file = here / "run/300/state/d/0.small.0"
    os.truncate(file, file.stat().st_size // 2)
    lines = command.text("ls", "run", code=1)
    assert [line.split()[-1] for line in lines[2:4]] == ["latest", "damaged"]
    assert lines[4].startswith("step 300 is damaged: ")
    assert "wanted 224 bytes, found 112" in lines[4]
    assert command.json("ls", "run", code=1)["steps"][2]["damage"]
    assert "wanted 224 bytes" in command.text("explain", "run", code=1)[3]
    _, why, counted = command.text("explain", "run", 300, code=1)
    assert why.startswith("it is damaged: ")
    assert counted == "policies count it until flaxckpt verify --mark marks it"
    assert "the checkpoint is damaged: " in command.text("ls", "run/300", code=1)[2]
    file.unlink()
    assert "found none" in command.text("ls", "run", code=1)[4]


@pytest.mark.parametrize(
    "lost", ["default/manifest.ocdbt", "default/d", "default/_METADATA", "default"]
)
def test_all_verbs_detect_lost_arrays_of_newest_orbax_step(here, command, lost):
    gone = here / "orbax/step_2" / lost
    (shutil.rmtree if gone.is_dir() else os.unlink)(gone)
    found = command.json("ls", "orbax", code=1)["steps"]
    assert [step["marks"] for step in found] == [["latest"], ["damaged"]]
    for words in (("ls", "orbax"), ("explain", "orbax"), ("verify", "orbax", 2)):
        text = "\n".join(command.text(*words, code=1))
        assert "damaged" in text.lower(), words
    assert "restore another step" in command.refuses("show", "orbax", "2", code=1)
    keep = ["-k", "best:1:loss:min", "-k", "latest:1"]
    assert command.json("ls", "orbax", *keep, code=1)["best"] == {"loss": 1}
    refused = command("prune", "orbax", "-k", "latest:1", "--yes", code=1)
    assert "restore another step" in refused.stderr
    assert (here / "orbax/step_1").is_dir()


def test_ls_does_not_warn_about_skipped_items(here, command, caplog):
    with ocp.CheckpointManager(here / "keys") as manager:
        state = ocp.args.StandardSave({"w": np.ones(3)})
        key = ocp.args.JaxRandomKeySave(jax.random.key(0))
        manager.save(1, args=ocp.args.Composite(state=state, key=key))
    caplog.clear()
    command("ls", "keys")
    assert "left out" not in caplog.text
    command("show", "keys")
    assert "left out" in caplog.text


def test_ls_reads_policies_from_config(here, command):
    (here / "run.toml").write_text(
        "[train]\nkeep = [{best = 1, metric = 'loss', mode = 'min'}]\n"
    )
    found = command.json("ls", "run", "--config", "run.toml", "--group", "train")
    assert found["steps"][1]["marks"] == ["best"]
    assert "no table" in command.refuses(
        "ls", "run", "--config", "run.toml", "--group", "test"
    )
    assert "pass --config" in command.refuses("ls", "run", "--group", "train")


def test_ls_lists_orbax_runs(here, command):
    found = command.json("ls", "orbax", "--keep", "best:1:loss:min")
    assert [step["step"] for step in found["steps"]] == [1, 2]
    assert {step["format"] for step in found["steps"]} == {"orbax"}
    assert [step["marks"] for step in found["steps"]] == [["best"], ["latest"]]


@pytest.mark.parametrize(
    ("name", "format_name"),
    [("w.safetensors", "safetensors"), ("w.msgpack", "msgpack")],
)
def test_ls_lists_single_checkpoint(here, command, name, format_name):
    found = command.json("ls", name)
    assert not found["is_run"]
    assert [step["format"] for step in found["steps"]] == [format_name]
    assert f"1 checkpoint, {format_name}" in command.text("ls", name)[-1]


def test_ls_lists_file_steps(here, command):
    (here / "files").mkdir()
    for step in (1, 2):
        shutil.copy("w.msgpack", here / "files" / f"checkpoint_{step}")
    found = command.json("ls", "files", "--keep", "latest:1")
    assert [step["why"] for step in found["steps"]] == [[], ["newest", "LatestN(1)"]]


def test_ls_exits_with_1_for_damaged_step(here, command):
    run_files.mark_damaged(here / "run" / "300", "w: its checksum\nis another")
    (here / "run" / "200" / "flaxckpt.json").unlink()
    (here / "run" / "200" / "state" / "_METADATA").unlink()
    lines = command.text("ls", "run", code=1)
    assert lines[1].endswith("latest")
    assert "step 300 is damaged: w: its checksum\\nis another" in lines
    [told] = [line for line in lines if line.startswith("step 200 is damaged: ")]
    assert "restore another step" in told
    found = command.json("ls", "run", code=1)["steps"]
    assert [step["marks"] for step in found] == [["latest"], ["damaged"], ["damaged"]]
    assert found[2]["damage"].startswith("w: its checksum")


def test_ls_reports_empty_run(here, command):
    assert command.text("ls", "empty") == ["empty has no steps yet"]
    assert command.json("ls", "empty")["steps"] == []


def test_commands_reject_paths_without_checkpoint(here, command):
    for verb in ("ls", "show", "verify", "du", "explain"):
        assert "does not exist" in command.refuses(verb, "nowhere")
        assert "is not a checkpoint of a supported format" in command.refuses(
            verb, "notes.txt"
        )
    assert "did you mean" not in command.refuses("ls", "run", "--bogus")


@pytest.mark.parametrize(
    "policy",
    [
        *("newest", "latest", "latest:x", "latest:0", "best:1:loss"),
        *("best:1:loss:least", "secs:never", "steps:1;2", ":"),
        *("closest:0", "duration:long", "exponential:100", "exponential:100:1"),
    ],
)
def test_ls_rejects_invalid_policies(here, command, policy):
    assert f"--keep {policy}" in command.refuses("ls", "run", "--keep", policy)


def test_show_escapes_terminal_commands_in_names(here, command):
    flaxckpt.save("bad", {"\x1b[31mred": np.ones(2), "[bold]x[/bold]": np.ones(2)})
    printed = command("show", "bad").stdout
    assert "\x1b" not in printed
    assert "\\x1b[31mred" in printed
    assert "[bold]x[%2Fbold]" in printed


_EVIL = "\x1b]0;title\x07[red]"


@pytest.mark.parametrize("width", [200, 50])
def test_no_verb_prints_terminal_commands(tmp_path, command, monkeypatch, width):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", str(width))
    keep = [BestN(1, f"{_EVIL}loss", "min"), LatestN(2)]
    state = {f"{_EVIL}a": {f"{_EVIL}w": np.ones((2, 3), np.float32)}}
    metrics, told = {f"{_EVIL}loss": 1.0}, {f"{_EVIL}key": f"{_EVIL}value"}
    with flaxckpt.Checkpointer("run", keep=keep) as run:
        for step in (1, 2, 3):
            run.save(step, state, metrics=metrics, metadata=told)
    with flaxckpt.Checkpointer("next") as run:
        on_step = flaxckpt.CheckpointCallback(run, every_steps=1)
        state, _ = on_step.restore_or_init(state, source="run")
        on_step(1, state, metrics=metrics)
    np.savez("other.npz", **{f"{_EVIL}w": np.ones((2, 3), np.float32)})
    (next(Path("run/3").rglob("flaxckpt.json"))).write_text("{")
    for args in (
        *(("ls", "run"), ("ls", "run", "--sort", f"{_EVIL}x"), ("ls", _EVIL)),
        *(("show", "run", 2), ("show", "next"), ("show", "other.npz")),
        *(("explain", "run"), ("explain", "run", 2), ("doctor", "run"), ("du", "run")),
        *(("explain", "run", "-k", "best:1:x:min"), ("prune", "run")),
        *(("prune", "run", "-k", "latest:1"), ("verify", "run", "--all")),
        *(("diff", "run", "next"), ("diff", "other.npz", "next")),
        *(("plan", "run", "next"), ("plan", "other.npz", "next")),
        *(("plan", "other.npz", "next", "--suggest"), ("convert", "next", _EVIL)),
    ):
        result = CliRunner().invoke(app, [*map(str, args)])
        assert not isinstance(result.exception, Exception), args
        assert "\x1b]" not in result.output, args
        assert "\x07" not in result.output, args
    assert "[red]loss" in command("ls", "next").stdout.replace("\n", "")


@pytest.mark.parametrize("lost", ["an end", "the manifest"])
def test_ls_checks_files_of_best_step(here, command, lost):
    ranked = ["run", "-k", "best:1:loss:min"]
    assert command.json("ls", *ranked)["best"] == {"loss": 200}
    damaged = here / "run/200/flaxckpt.json"
    if lost == "the manifest":
        damaged.unlink()
    else:
        damaged = largest_file(here / "run" / "200" / "state")
        damaged.write_bytes(damaged.read_bytes()[:-1])
    assert not any("damaged" in line for line in command.text("ls", "run"))
    found = command.json("ls", *ranked, code=1)
    assert found["best"] == {"loss": 300}
    assert [step["marks"] for step in found["steps"]] == [
        [],
        ["damaged"],
        ["latest", "best"],
    ]
    assert damaged.name in found["steps"][1]["damage"]
    *_, last = command.text("ls", *ranked, code=1)
    assert last.endswith("; best: lowest loss")
    reasons = command.json("explain", *ranked, code=1)
    assert damaged.name in reasons["200"][0]
    for step in (100, 300):
        largest_file(here / "run" / str(step) / "state").unlink()
    found = command.json("ls", *ranked, code=1)
    assert found["best"] == {}
    assert sum("damaged" in step["marks"] for step in found["steps"]) == 3
    assert "best" not in command.text("ls", *ranked, code=1)[-1]


# ---- show ---------------------------------------------------------------------------


def test_show_prints_tree_with_types_and_sizes(here, command):
    lines = command.text("show", "run")
    assert lines[0].startswith("run/300: flaxckpt, step 300, ")
    assert lines[1] == "metrics: loss=2"
    assert lines[2].split() == ["leaf", "type", "size"]
    rows = [line.split() for line in lines]
    assert ["kernel", "float32[4,", "3]", "48", "B"] in rows
    assert ["dense", "2", "leaves", "60", "B"] in rows
    shallow = command.text("show", "run", "--step", 100, "--depth", 1)
    assert shallow[-1] == "… and 14 more below: --depth 5 shows all"
    assert not any("kernel" in line for line in shallow)


def test_show_describes_every_leaf_in_json(here, command):
    found = command.json("show", "run", "--step", 100)
    assert (found["step"], found["format"]) == (100, "flaxckpt")
    assert found["leaves"].keys() == flaxckpt.metadata("run").leaves.keys()
    moment = found["leaves"]["opt_state/0/mu/dense/kernel"]
    assert (moment["type"], moment["shape"]) == ("float32[4, 3]", [4, 3])
    assert moment["role"]["field"] == "mu"


def test_show_reports_specs_of_sharded_leaves(here, command):
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]), ("data",))
    sharding = jax.sharding.NamedSharding(
        mesh, jax.sharding.PartitionSpec("data", None)
    )
    flaxckpt.save("sharded", {"w": jax.device_put(np.ones((4, 2)), sharding)})
    assert "P('data', None)" in command("show", "sharded").stdout
    found = command.json("show", "sharded")
    assert found["leaves"]["w"]["spec"] == ["data", None]


def test_show_reads_single_leaf(here, command):
    flaxckpt.save("one", {"w": np.array([np.nan, np.inf, 0.0, 1.0, 3.0])})
    lines = command.text("show", "one", "w")
    assert lines[0] == "w: float64[5]"
    assert {"elements    5", "zeros       1"} <= {*lines}
    assert "not finite  1 NaN, 1 infinite" in lines
    assert "values      NaN, inf, 0, 1, 3" in lines
    assert any("█" in line for line in lines)
    found = command.json("show", "one", "w")
    assert found["values"] == ["NaN", "Infinity", 0.0, 1.0, 3.0]
    assert (found["min"], found["max"], sum(found["histogram"])) == (0.0, 3.0, 3)


def test_show_counts_leaves_of_container(here, command):
    lines = command.text("show", "run", "params")
    assert lines[1].split() == ["params", "2", "leaves", "60", "B"]
    assert command.json("show", "run", "params")[0]["leaves"] == 2


@pytest.mark.parametrize(
    ("path", "advice"),
    [
        ("params/dense/bais", "did you mean params/dense/bias?"),
        ("params/dens", "did you mean params/dense?"),
        ("parms/dense/bias", "did you mean params/dense/bias?"),
        ("params/dense/bias/x", "did you mean params/dense/bias?"),
        ("bias", "did you mean params/dense/bias, opt_state/0/mu/dense/bias, "),
        ("params/zzz", "it has params/dense"),
        ("zzz", "it has step, params, opt_state"),
    ],
)
def test_show_suggests_nearest_branches(here, command, path, advice):
    assert advice in command.refuses("show", "run", path)


@pytest.mark.parametrize("end", ["", "/w", "/W"])
def test_show_suggests_escaped_key_with_slashes(here, command, end):
    layers = {f"mlp/~/linear_{i}": {"w": np.ones((2, 3))} for i in range(2)}
    flaxckpt.save("haiku", {"params": layers, "n": 1})
    said = command.refuses("show", "haiku", f"params/mlp/~/linear_1{end}")
    nearest = f"params/mlp%2F~%2Flinear_1{end.lower()}"
    assert f"did you mean {nearest}" in said
    assert "A slash in a key is written %2F" in said
    command("show", "haiku", nearest)


def test_show_suggests_layer_of_same_number(here, command):
    flaxckpt.save("deep", {f"layers_{n}": {"w": np.ones(1)} for n in range(12)})
    assert "did you mean layers_3/w?" in command.refuses("show", "deep", "layer_3/w")
    found = command.refuses("show", "deep", "w")
    assert "did you mean layers_{0..11}/w?" in found


def test_show_truncates_many_leaves(here, command):
    flaxckpt.save("big", {f"layer_{i}": {"w": np.ones(1)} for i in range(300)})
    lines = command.text("show", "big")
    assert len(lines) == 1 + 1 + 100 + 1
    assert lines[-1] == "… and 501 more below: --depth 2 shows all"
    assert len(command.text("show", "big", "--depth", 2)) == 2 + 601
    assert len(command.json("show", "big")["leaves"]) == 300


def test_show_supports_every_format(here, command):
    for name in ("orbax", "w.safetensors", "w.msgpack"):
        assert "float32[2, 3]" in command("show", name).stdout
        found = command.json("show", name, "w")
        assert (found["mean"], found["std"], found["count"]) == (2.0, 0.0, 6)


@pytest.mark.parametrize(
    "name",
    [
        *("flaxckpt-1/files", "orbax-0.12.8/v0_manager"),
        *("orbax-0.12.8/v1_training", "legacy-orbax/both", "t5x-3/checkpoint_7"),
        *("t5x-3/single_3", "streaming/streaming_train_state", "safetensors/sharded"),
        *("flax-msgpack/checkpoint_3", "flax-msgpack"),
    ],
)
def test_read_only_verbs_support_every_format_and_leaf(command, name):
    path = GOLDEN / name
    for verb in ("ls", "show", "verify", "du"):
        assert command.text(verb, path)
        assert command.json(verb, path)
    for leaf in command.json("show", path)["leaves"]:
        assert command.json("show", path, leaf)["info"]


# ---- diff ---------------------------------------------------------------------------


def test_diff_of_equal_checkpoints_exits_with_0(here, command):
    lines = command.text("diff", "orbax", "w.safetensors")
    assert lines[-1] == "1 leaf is equal"
    found = command.json("diff", "w.msgpack", "w.safetensors")
    assert found["equal"]
    assert found["same"] == ["w"]


def test_diff_of_two_steps_lists_changed_leaves(here, command):
    lines = command.text("diff", "run", "-a", 100, "-b", 200, code=1)
    assert lines[:2] == ["a: run/100", "b: run/200"]
    [kernel] = [line for line in lines if line.startswith("params/dense/kernel")]
    assert kernel.split()[1:] == ["12", "of", "12", "100", "0.995"]
    found = command.json("diff", "run", "-a", 100, "-b", 200, code=1)
    assert not found["equal"]
    assert found["changed"]["params/dense/kernel"]["max_abs"] == 100.0


def test_diff_without_values_compares_structure(here, command):
    found = command.json("diff", "run", "-a", 100, "-b", 200, "--no-values")
    assert found["equal"]
    lines = command.text("diff", "run", "-a", 100, "-b", 200, "--no-values")
    assert lines[-1].startswith("without reading values: all 8 leaves are equal")
    lines = command.text("diff", "run", "w.msgpack", code=1)
    assert any(line.split() == ["w", "only", "in", "b"] for line in lines)
    assert lines[-1].startswith("0 leaves differ, 0 are equal, ")


def test_diff_counts_leaves_of_other_shape_or_dtype_separately(here, command):
    same = {"n": jnp.ones(2), "v": jnp.ones(2)}
    flaxckpt.save("one", {**same, "w": jnp.ones(3), "x": jnp.ones(3)})
    flaxckpt.save("two", {**same, "w": jnp.zeros(3), "x": jnp.ones(4)})
    *_, last = command.text("diff", "one", "two", code=1)
    wanted = "1 leaf differs, 1 leaf has another shape or dtype, 2 are equal"
    assert last == wanted
    found = command.json("diff", "one", "two", code=1)
    assert found["retyped"] == ["x"]
    assert set(found["changed"]) == {"w", "x"}
    [last] = command.text("diff", "one", "two", "--only", "x", code=1)[-1:]
    assert last == "1 leaf has another shape or dtype, 0 are equal"


def test_diff_continues_past_damaged_item(here, command):
    with flaxckpt.Checkpointer(here / "items", items=("params", "opt")) as run:
        for step in (1, 2):
            run.save(step, {"params": {"w": jnp.ones(3)}, "opt": {"m": jnp.ones(2)}})
    shutil.rmtree(here / "items" / "2" / "params")
    lines = command.text("diff", "items", 1, 2, code=1)
    at = lines.index("cannot be read, and so may differ:")
    assert lines[at + 1].startswith("  params: in step 2: it ")
    assert lines[-1] == "0 leaves differ, 1 is equal, 1 item not compared"
    found = command.json("diff", "items", 1, 2, code=1)
    assert (found["equal"], [*found["damaged_items"]]) == (False, ["params"])
    assert command.json("diff", "items", 1, 2, "--only", "opt/.*")["equal"]


def test_diff_accepts_two_steps_after_run(here, command):
    by_options = command.json("diff", "run", "-a", 100, "-b", 200, code=1)
    assert command.json("diff", "run", 100, 200, code=1) == by_options
    newest = command.json("diff", "run", "-a", 100, "-b", 300, code=1)
    assert command.json("diff", "run", 100, code=1) == newest
    shutil.copytree("run/200", "100")  # an existing path is no step
    assert command.json("diff", "run", 100, "-a", 200)["equal"]
    assert command.json("diff", "run", 100, 200, code=1) == by_options
    assert "leave --step-a" in command.refuses("diff", "run", 100, 200, "-a", 300)
    for wrong in (("orbax", 200), (100, "run"), (100, "run", "x")):
        told = command.refuses("diff", "run", *wrong)
        assert f"got run, {wrong[0]}, {wrong[1]}" in told
        assert "flaxckpt diff A STEP B STEP" in told


def test_diff_accepts_steps_of_two_runs(here, command):
    shutil.copytree("run", "other")
    assert command.json("diff", "run", 100, "other", 100)["equal"]
    found = command.json("diff", "run", 100, "other", 200, code=1)
    assert [found["a"], found["b"]] == [f"{here}/run/100", f"{here}/other/200"]


def test_diff_requires_two_checkpoints(here, command):
    assert "--step-a and --step-b" in command.refuses("diff", "run")
    assert "has no step 7" in command.refuses("diff", "run", "-a", 7)


# ---- verify -------------------------------------------------------------------------


def test_verify_of_good_steps_exits_with_0(here, command):
    line, others = command.text("verify", "run")
    assert others == "2 other steps were not read (200, 100): --all reads all"
    assert command.json("verify", "run")["not_read"] == [100, 200]
    assert line.startswith("run/300: good, ")
    [line] = command.text("verify", "run", "--all")
    assert line.startswith("3 of 3 steps good; ")
    found = command.json("verify", "run", "--all")
    assert found["ok"]
    assert [report["step"] for report in found["reports"]] == [100, 200, 300]


def test_verify_detects_flipped_bit(here, command):
    damage(here / "run" / "200")
    assert command.json("verify", "run")["ok"]
    lines = command.text("verify", "run", "--step", 200, code=1)
    assert lines[0].startswith("run/200: DAMAGED, ")
    assert lines[1] == "  1 of 8 leaves cannot be read: params/dense/kernel"
    assert lines[2] == "  state/d/0.small.0 -> params/dense/kernel"
    assert "its CRC-32C differs" in lines[3]
    *_, last, why, advice = command.text("verify", "run", "--all", code=1)
    assert why.startswith("not marked as damaged: policies count step")
    assert pasted([advice], "To update the marks")[-1] == "--mark"
    assert last.startswith("2 of 3 steps good; 1 DAMAGED: 200; ")
    found = command.json("verify", "run", "--all", code=1)
    assert [report["ok"] for report in found["reports"]] == [True, False, True]
    assert [*found["reports"][1]["problems"]] == ["params/dense/kernel"]
    assert [*found["reports"][1]["unreadable"]] == ["params/dense/kernel"]
    assert found["reports"][1]["summary"] == lines[1].strip()


def test_verify_marks_step_without_description(here, command):
    (here / "run/100/state/_METADATA").unlink()
    damage(here / "run/200")
    command.text("verify", "run", "--all", "--mark", code=1)
    assert [*flaxckpt.Checkpointer(here / "run").damaged()] == [100, 200]
    lines = command.text("verify", "run", "100", "--mark", code=1)
    assert lines[-1] == "step 100 was already marked as damaged"


def test_verify_marks_damaged_steps_on_request(here, command):
    damage(here / "run" / "200")
    assert "--mark" in command.text("verify", "run", "--all", code=1)[-1]
    marker = here / "run" / "200" / "DAMAGED"
    assert not marker.exists()
    command.text("verify", "run", "--all", "--mark", code=1)
    assert marker.exists()
    assert "--mark" not in command.text("verify", "run", "--all", code=1)[-1]
    marked = marker.read_bytes()
    lines = command.text("verify", "run", "200", "--mark", code=1)
    assert lines[-1] == "step 200 was already marked as damaged"
    assert marker.read_bytes() == marked  # with the time of the first marker
    lines = command.text("ls", "run", code=1)
    assert "3 steps (1 damaged), " in lines[-1]
    assert "DAMAGED: " in "".join(command.text("show", "run", "--step", 200))
    assert command.text("explain", "run", 200, code=1)[-1].startswith("it is damaged")
    assert command.text("verify", "run")[-1].endswith("; marked as damaged: 200")
    damage(here / "run" / "200")  # as it was
    good, still, advice = command.text("verify", "run", "200")
    assert "good" in good
    assert still.startswith("still marked as damaged: policies do not count step 200,")
    words = pasted([advice], "To update the marks")
    command.text(*words)
    assert not marker.exists()
    assert len(command.text("verify", "run", "200")) == 1
    assert "DAMAGED" not in "".join(command.text("show", "run", "--step", 200))
    events = run_files.read_events(here / "run")
    kinds = [event.kind for event in events if event.step == 200]
    assert kinds[-2:] == ["found_damaged", "found_good"]
    refused = command("verify", "run/200", "--mark", code=2)
    assert "--mark needs the run directory" in refused.stderr


def test_verify_accepts_steps(here, command):
    lines = command.text("verify", "run", 100, 200)
    assert [line.split(":")[0] for line in lines] == ["run/100", "run/200"]
    assert len(command.json("verify", "run", 100, "-s", 100)["reports"]) == 1
    damage(here / "run" / "200")
    assert not command.json("verify", "run", 100, 200, code=1)["ok"]
    assert "no step 300000" in command.refuses("verify", "run", 300000)
    for verb in ("du", "report"):
        told = command.refuses(verb, "run", 200)
        assert ("write --step 200" in told) == (verb == "du")
    assert command.json("show", "run", 200)["step"] == 200
    assert "--all" not in "".join(command.text("verify", "w.msgpack"))


def test_verify_all_reports_remains_of_step(here, command):
    shutil.rmtree(here / "run" / "200" / "state")
    (here / "run" / "200" / "flaxckpt.json").unlink()
    lines = command.text("verify", "run", "--all", code=1)
    assert "run/200: DAMAGED" in lines


def test_verify_counts_leaves_without_checksums(here, command):
    lines = command.text("verify", "w.safetensors")
    assert "  1 without checksums: only read" in lines
    assert "leave the steps out" in command.refuses("verify", "run", "--all", "-s", 100)
    assert command.text("verify", "empty", "--all") == ["empty has no steps yet"]


# ---- plan ---------------------------------------------------------------------------

SUCCEEDS = "The restore would succeed, if the files are whole: no array was read."


def test_plan_into_equal_state_exits_with_0(here, command):
    first, last, call = command.text("plan", "run", "run", "--step", 100)
    assert call == "In Python: flaxckpt.load('run', state, step=100)"
    *_, call = command.text("plan", "run", "run", "--unused", "error")
    assert call == "In Python: flaxckpt.load('run', state, unused=\"error\")"
    assert "run/100: 8 loaded" in first
    assert last == SUCCEEDS
    found = command.json("plan", "run", "run")
    assert found["ok"]
    assert found["leaves"]["params/dense/bias"]["actions"] == ["loaded"]


def test_plan_exits_with_1_for_unfit_leaves(here, command):
    lines = command.text("plan", "orbax", "run", code=1)
    assert any("missing" in line for line in lines[1:])
    assert not any("conflict" in line for line in lines)
    found = command.json("plan", "orbax", "run", code=1)
    asked = "flaxckpt plan orbax run"
    assert lines[-5:] == [
        "3 leaves cannot be restored",
        f"For the source of a new run: {asked} --as-source",
        f"To guess the transforms from the names: {asked} --suggest",
        f"For a state with values for the missing leaves: {asked} --missing init",
        f"In Python: {found['advice']}",
    ]
    assert len(found["problems"]) == 3


def test_plan_suggests_rename_for_renamed_model(here, command):
    save_as("old")
    save_as("new")
    lines = command.text("plan", "old", "new", code=1)
    assert lines[-4:] == [
        "2 leaves cannot be restored",
        r"For the source of a new run: flaxckpt plan old new --rename"
        r" 'params/old/(.*)=params/new/\1' --as-source",
        r"To rename the leaves: flaxckpt plan old new --rename"
        r" 'params/old/(.*)=params/new/\1'",
        r'In Python: Pass transforms=[rename(r"params/old/(.*)", r"params/new/\1")].',
    ]
    found = command.json("plan", "old", "new", code=1)
    assert found["leaves"]["opt_state/0/mu/new/kernel"]["actions"] == ["init"]
    [(pattern, name)] = found["renames"]
    words = pasted(lines, "To rename the leaves")
    assert words[-1] == f"{pattern}={name}"
    assert command.json(*words)["ok"], "the advice helps"


def pasted(lines, label):
    """Returns the arguments of the command in the line that begins with `label`."""
    [line] = [line for line in lines if line.startswith(f"{label}: ")]
    name, *words = shlex.split(line.removeprefix(f"{label}: "))
    assert name == "flaxckpt"
    return words


def save_as(name):
    """Saves a model with Adam, under `name` in its parameters."""
    params = {name: {"kernel": jnp.ones((4, 4)), "bias": jnp.ones(4)}}
    optimizer = optax.adam(1e-3).init(params)
    flaxckpt.save(name, {"params": params, "opt_state": optimizer})


def test_plan_applies_renames_and_casts_first(here, command):
    save_as("old")
    save_as("new")
    asked = ["plan", "old", "new", "--rename", r"params/old/(.*)=params/new/\1"]
    assert ": 7 loaded (6 renamed); " in command.text(*asked)[0], "moments follow"
    found = command.json(*asked, "--cast", ".*/kernel=bfloat16")
    kernel = found["leaves"]["params/new/kernel"]
    assert kernel["transforms"] == ["rename", "cast"]
    assert kernel["sources"] == ["params/old/kernel"]
    assert "matches no leaf" in command.refuses("plan", "old", "new", "--rename", "a=b")
    assert "--suggest guesses" in command.refuses(*asked, "--suggest")


def test_plan_counts_leaves_initialized_by_optimizer(here, command):
    save_as("new")
    lines = command.text("plan", "new", "new", "--drop", "opt_state/.*")
    assert lines[-3:-1] == [
        "The optimizer initializes 5 leaves: pass a state that has one, such as a"
        " TrainState.",
        SUCCEEDS,
    ]
    assert "initializes" not in "".join(command.text("plan", "new", "new"))


def test_plan_advises_optimizer_only_if_state_has_one(here, command):
    save_as("new")
    flaxckpt.save("bare", {"params": {"new": flaxckpt.load("new")["params"]["new"]}})
    for state, has_optimizer in (("new", True), ("bare", False)):
        asked = ["plan", state, state, "--drop", ".*/kernel", "--missing", "init"]
        for options in ([], ["--as-source"]):
            text = " ".join(command.text(*asked, *options)[-4:])
            assert "Pass a state with values for them, not only shapes" in text
            assert ("such as a TrainState" in text) == has_optimizer


def test_plan_without_arrays_reports_success(here, command):
    flaxckpt.save("names", {"name": "a"})
    assert command.text("plan", "names", "names")[-2] == "The restore would succeed."


def save_with_head(name, head, classes):
    params = {"trunk": jnp.ones((4, 4)), head: jnp.ones((4, classes))}
    state = TrainState.create(apply_fn=None, params=params, tx=optax.adamw(1e-3))
    flaxckpt.save(name, state)


@pytest.mark.parametrize("target", ["tuned", "tuned.json"])
def test_plan_keeps_values_of_new_head_in_fine_tune(here, command, target):
    save_with_head("base", "head", 10)
    save_with_head("tuned", "classifier", 3)
    (here / "tuned.json").write_text(command("show", "tuned", "--json").stdout)
    lines = command.text("plan", "base", target, code=1)
    assert "1 leaf cannot be restored" in lines
    words = pasted(lines, "For a state with values for the missing leaves")
    assert words == ["plan", "base", target, "--missing", "init"]
    found = command.json("plan", "base", target, code=1)["leaves"]
    assert found["params/classifier"]["actions"] == ["conflict"]
    assert found["opt_state/0/mu/classifier"]["actions"] == ["init"]
    assert found["opt_state/0/mu/trunk"]["actions"] == ["loaded"]
    lines = command.text(*words)
    note, last = lines[lines.index(SUCCEEDS) - 1 :][:2]
    assert last == SUCCEEDS
    assert note.startswith(
        "Not from the checkpoint: 3 leaves. Pass a state with values"
    )
    # The program of this plan: a state with values for the new head.
    found = command.json("plan", "base", target, "--missing", "init")["leaves"]
    params = {"trunk": jnp.zeros((4, 4)), "classifier": jnp.ones((4, 3))}
    state = TrainState.create(apply_fn=None, params=params, tx=optax.adamw(1e-3))
    planned = flaxckpt.plan("base", state, missing="init")
    assert not planned.problems
    assert found.keys() == planned.leaves.keys()
    for path, leaf in planned.leaves.items():
        assert found[path]["actions"] == [*leaf.actions], path


def test_plan_suggests_reinitializing_head_of_other_shape(here, command):
    save_with_head("base", "head", 10)
    save_with_head("tuned", "head", 3)
    lines = command.text("plan", "base", "tuned", code=1)
    words = pasted(lines, BEGIN_ANEW)
    asked = ["plan", "base", "tuned"]
    assert words == [*asked, "--missing", "init", "--drop", "params/head"]
    assert command.json(*words)["ok"]
    assert command.json("plan", "base", "tuned", code=1)["drops"] == ["params/head"]
    [line] = [line for line in lines if line.startswith("In Python: ")]
    assert 'transforms=[drop(r"params/head")], missing="init"' in line
    initial = ["plan", "base", "tuned", "--missing", "init"]
    lines = command.text(*initial, code=1)
    assert pasted(lines, BEGIN_ANEW) == words
    asked += [
        "--optimizer",
        "match",
        "--unused",
        "ignore",
        "--cast",
        "params/t.*=bfloat16",
    ]
    words = pasted(command.text(*asked, code=1), BEGIN_ANEW)
    given = [(name, words[words.index(name) + 1]) for name in words if name[0] == "-"]
    assert given == [
        ("--optimizer", "match"),
        ("--missing", "init"),
        ("--unused", "ignore"),
        ("--drop", "params/head"),
        ("--cast", "params/t.*=bfloat16"),
    ]
    assert command.json(*words)["ok"]


BEGIN_ANEW = "To initialize leaves of other shapes"


def test_plan_suggests_as_source_for_state_of_another_run(here, command):
    save_with_head("base", "head", 10)
    state = flaxckpt.load("base")
    with flaxckpt.Checkpointer(here / "a run") as run:
        for step in (1, 2):
            run.save(step, state)
    words = pasted(
        command.text("plan", "a run", "base", "-s", 1), "For the source of a new run"
    )
    assert words == ["plan", "a run", "base", "--step", "1", "--as-source"]
    assert command.json(*words)["ok"]
    (here / "wanted.json").write_text(command("show", "base", "--json").stdout)
    found = pasted(
        command.text("plan", "base", "wanted.json"), "For the source of a new run"
    )
    assert found == ["plan", "base", "wanted.json", "--as-source"]
    flaxckpt.save("bare", {"params": state.params})
    for same in (
        ("a run", "a run"),
        ("a run/1", "a run"),
        ("a run", here / "a run" / "2"),
        ("base", "bare"),
        ("a run", "base", "--as-source"),
    ):
        assert "For the source" not in "".join(command.text("plan", *same))


def test_plan_suggests_dropping_whole_branch_of_deep_head(here, command):
    for name, width in (("base", 10), ("tuned", 3)):
        layers = {f"layer_{n}": {"kernel": jnp.ones((4, width))} for n in range(5)}
        params = {"trunk": jnp.ones(4), "head.1": layers}
        flaxckpt.save(name, {"params": params, "opt": optax.adam(1e-3).init(params)})
    lines = command.text("plan", "base", "tuned", code=1)
    words = pasted(lines, BEGIN_ANEW)
    assert words[3:] == ["--missing", "init", "--drop", r"params/head\.1/.*"]
    found = command.json(*words)
    assert found["leaves"]["opt/0/mu/head.1/layer_4/kernel"]["actions"] == ["init"]
    assert found["leaves"]["opt/0/mu/trunk"]["actions"] == ["loaded"]


def test_plan_suggests_no_useless_drop(here, command):
    flaxckpt.save("base", {"head": jnp.ones(10), "n": jnp.ones(2)})
    flaxckpt.save("tuned", {"head": jnp.ones(3), "n": jnp.ones(2, int)})
    assert command.json("plan", "base", "tuned", code=1)["drops"] == []
    flaxckpt.save("new", {"tail": jnp.ones(3), "n": jnp.ones(2)})
    renamed = ["plan", "base", "new", "--rename", "head=tail"]
    assert command.json(*renamed, code=1)["drops"] == [], "--drop goes first"


def test_plan_as_source_reinitializes_optimizer(here, command):
    save_with_head("base", "head", 10)
    anew = {"step", "opt_state/0/count", "opt_state/0/mu/head", "opt_state/0/mu/trunk"}
    anew |= {"opt_state/0/nu/head", "opt_state/0/nu/trunk"}
    lines = command.text("plan", "base", "base", "--as-source")
    assert ": 6 init, 2 loaded; " in lines[0]
    assert {line.split()[0] for line in lines[2:-4]} == anew
    assert lines[-4] == "From the checkpoint: params/trunk, params/head."
    assert lines[-3].startswith("Begin anew, as in a new run: 6 leaves.")
    assert lines[-2] == SUCCEEDS
    # The new run does what is planned.
    params = {"trunk": jnp.zeros((4, 4)), "head": jnp.zeros((4, 10))}
    state = TrainState.create(apply_fn=None, params=params, tx=optax.adamw(1e-3))
    saved = flaxckpt.load("base").replace(step=70)
    flaxckpt.save("trained", saved.replace(opt_state=saved.opt_state))
    found = command.json("plan", "trained", "base", "--as-source")["leaves"]
    assert {path for path, leaf in found.items() if leaf["actions"] == ["init"]} == anew
    with flaxckpt.Checkpointer("fine-tuned") as run:
        callback = flaxckpt.CheckpointCallback(run, every_steps=10)
        begun, step = callback.restore_or_init(state, source="trained")
        callback.close()
    assert (int(begun.step), step) == (0, 0)
    np.testing.assert_array_equal(begun.params["trunk"], np.ones((4, 4)))
    continued = [*("plan", "trained", "base", "--as-source"), "--optimizer", "match"]
    assert ": 8 loaded; " in command.text(*continued)[0]


@pytest.mark.parametrize("target", ["tuned", "tuned.json"])
def test_plan_suggests_source_plan_and_call_for_other_head(here, command, target):
    save_with_head("tuned", "head", 3)
    (here / "tuned.json").write_text(command("show", "tuned", "--json").stdout)
    tuned = flaxckpt.load("tuned")
    params = {"trunk": jnp.ones((4, 4)), "head": jnp.ones((4, 10))}
    state = TrainState.create(apply_fn=None, params=params, tx=optax.adamw(1e-3))
    with flaxckpt.Checkpointer("base") as run:
        for step in (1, 2):
            params = {**params, "trunk": jnp.full((4, 4), float(step))}
            run.save(step, state.replace(params=params))
    asked = ["plan", "base", target, "-s", 1]
    dropped = command.text(*asked, "--drop", "params/head", code=1)
    words = pasted(dropped, "For the source of a new run")
    assert command.text(*words)[-2] == SUCCEEDS
    lines = command.text(*asked, code=1)
    words = pasted(lines, "For the source of a new run")
    assert "--as-source" in words
    lines = command.text(*words)
    assert lines[-2] == SUCCEEDS
    label = "In Python (from flaxckpt.transforms import drop): "
    assert lines[-1].startswith(f"{label}callback.restore_or_init(state, source='base'")
    with flaxckpt.Checkpointer("fine-tuned") as run:
        callback = flaxckpt.CheckpointCallback(run, every_steps=10)
        names = {"callback": callback, "drop": flaxckpt.transforms.drop}
        begun, _ = eval(lines[-1].removeprefix(label), names | {"state": tuned})
        callback.close()
    np.testing.assert_array_equal(begun.params["trunk"], np.ones((4, 4)))
    np.testing.assert_array_equal(begun.params["head"], tuned.params["head"])


def test_plan_as_source_requires_known_optimizer(here, command):
    save_with_head("base", "head", 10)
    content = {"params": {"trunk": "float32[4, 4]"}, "opt_state": {"n": "int32[]"}}
    (here / "wanted.json").write_text(json.dumps(content))
    asked = ["plan", "base", "wanted.json", "--as-source"]
    assert "TARGET names no classes, so that opt_state/n would" in command.refuses(
        *asked
    )
    del content["opt_state"]
    (here / "wanted.json").write_text(json.dumps(content))
    assert ": 1 loaded" in command.text(*asked)[0]
    (here / "wanted.json").write_text(command("show", "base", "--json").stdout)
    assert ": 6 init, 2 loaded" in command.text(*asked)[0]


def test_plan_suggests_matching_optimizer_for_leaves_without_class(here, command):
    save_with_head("base", "head", 10)
    save_with_head("tuned", "classifier", 3)
    content = command.json("show", "tuned")
    del content["structure"]  # as flaxckpt 0.1.0 printed it
    (here / "tuned.json").write_text(json.dumps(content))
    asked = ["plan", "base", "tuned.json"]
    found = command.json(*asked, code=1)["leaves"]
    assert found["opt_state/0/mu/classifier"]["actions"] == ["conflict"]
    matched = pasted(command.text(*asked, code=1), INITIALIZES)
    assert matched == [*asked, "--optimizer", "match"]
    found = command.json(*matched, code=1)["leaves"]
    assert found["opt_state/0/mu/classifier"]["actions"] == ["init"]
    assert not any(INITIALIZES in line for line in command.text(*matched, code=1))


INITIALIZES = "For an optimizer that initializes its leaves, as TARGET names no classes"


def test_plan_of_resized_head_requires_drop_and_init(here, command):
    save_with_head("base", "head", 10)
    save_with_head("tuned", "head", 3)
    drop = ["plan", "base", "tuned", "--drop", "params/head"]
    assert command.json("plan", "base", "tuned", "--missing", "init", code=1)
    assert not command.json(*drop, code=1)["ok"]
    assert not any("--suggest" in line for line in command.text(*drop, code=1))
    assert command.json(*drop, "--missing", "init")["ok"]


def test_plan_reports_damaged_checkpoint(here, command):
    assert command.json("plan", "run", "run", "-s", 200)["damage"] is None
    largest = here / "run/200/state/d/0.small.0"
    largest.write_bytes(largest.read_bytes()[:-1])
    *_, last = command.text("plan", "run", "run", "-s", 200, code=1)
    assert last.startswith("The checkpoint is damaged, so the restore would fail: ")
    assert last.endswith("; pass another step to --step")
    assert largest.name in last
    found = command.json("plan", "run", "run", "-s", 200, code=1)
    assert not found["ok"]
    assert not found["problems"]
    assert largest.name in found["damage"]
    assert command.json("plan", "run", "run")["ok"], "the newest step is whole"
    guessed = command.json("plan", "run", "run", "-s", 200, "--suggest", code=1)
    assert guessed["plan"]["damage"] == found["damage"]


def cut_off(file):
    file.write_bytes(file.read_bytes()[:-1])


@pytest.mark.parametrize("file", ["manifest.ocdbt", "d/tree"])
def test_plan_checks_files_needed_by_all_leaves(here, command, file):
    (here / "run/200/state" / file).unlink()
    *_, last = command.text("plan", "run", "run", "-s", 200, code=1)
    assert last.startswith("The checkpoint is damaged, so the restore would fail: ")
    assert Path(file).name in last


def test_plan_accepts_64_bit_numpy_arrays(tmp_path, command):
    flaxckpt.save(tmp_path / "c", {"table": np.arange(3), "w": jnp.ones(2)})
    lines = command.text("plan", tmp_path / "c", tmp_path / "c")
    assert "2 loaded" in lines[0]


@pytest.mark.parametrize("is_marked", [False, True])
def test_plan_checks_damage_where_restore_reads(here, command, is_marked):
    state = here / "run" / "300" / "state"
    old_stores.make_directories(state.parent)
    [chunk] = (state / "opt_state.0.mu.dense.kernel").glob("c*")
    cut_off(chunk)
    if is_marked:
        command("verify", "run", "-s", 300, "--mark", code=1)
    wanted = {"params": {"dense": {"kernel": "float32[4, 3]"}}}
    (here / "wanted.json").write_text(json.dumps(wanted))
    asked = ["plan", "run", "wanted.json", "-s", 300]
    *_, damage, last, _call = command.text(*asked)
    assert damage.startswith("The checkpoint is damaged, but as far as is known not")
    assert "opt_state" in damage
    assert last == SUCCEEDS
    found = command.json(*asked)
    assert found["damage"] is None
    assert "opt_state" in found["damage_elsewhere"]
    flaxckpt.load("run", {"params": {"dense": {"kernel": jnp.ones((4, 3))}}}, step=300)
    assert command.json("plan", "run", "run", "-s", 300, "--as-source")["ok"]
    lines = command.text("plan", "run", "run", "-s", 300, code=1)
    assert lines[-1].startswith("The checkpoint is damaged, so the restore would fail")
    assert SUCCEEDS not in lines
    [chunk] = (state / "params.dense.kernel").glob("c*")
    cut_off(chunk)
    assert "params.dense.kernel" in command.json(*asked, code=1)["damage"]


def test_plan_checks_marked_chunks_where_restore_reads(here, command):
    wanted = {"params": {"dense": {"kernel": "float32[4, 3]"}}}
    (here / "wanted.json").write_text(json.dumps(wanted))
    asked = ["plan", "run", "wanted.json", "-s", 300]
    chunks.flip(here / "run/300/state", "opt_state.0.mu.dense.kernel/c.0.0")
    command("verify", "run", "-s", 300, "--mark", code=1)
    found = command.json(*asked)
    assert found["damage"] is None
    assert "opt_state" in found["damage_elsewhere"]
    chunks.flip(here / "run/200/state", "params.dense.kernel/c.0.0")
    command("verify", "run", "-s", 200, "--mark", code=1)
    damage = command.json(*asked[:-1], 200, code=1)["damage"]
    assert "params/dense/kernel" in damage
    # The reason names one leaf of several, or the one that was damaged first.
    chunks.flip(here / "run/300/state", "params.dense.kernel/c.0.0")
    command("verify", "run", "-s", 300, "--mark", code=1)
    assert "opt_state" in command.json(*asked, code=1)["damage"]


def test_plan_assumes_damage_everywhere_if_leaves_are_unknown(here, command):
    """A restore marks a step after the first damage that it finds."""
    (here / "wanted.json").write_text(
        '{"params": {"dense": {"kernel": "float32[4, 3]"}}}'
    )
    asked = ["plan", "run", "wanted.json", "-s", 300]
    for name in ("opt_state.0.mu.dense.kernel", "params.dense.kernel"):
        chunks.flip(here / "run/300/state", f"{name}/c.0.0")
    with flaxckpt.Checkpointer("run") as run:
        run.restore()
    assert 300 in flaxckpt.Checkpointer("run", read_only=True).damaged()
    assert "does not say of which leaves" in command.json(*asked, code=1)["damage"]


def test_plan_checks_database_as_whole(here, command):
    flaxckpt.save("one", {n: jnp.ones(2000) for n in "ab"})
    (here / "wanted.json").write_text('{"a": "float32[2000]"}')
    assert command.json("plan", "one", "wanted.json")["ok"]
    for data in (here / "one" / "state").rglob("d/*"):
        data.unlink()
    found = command.json("plan", "one", "wanted.json", code=1)
    assert "state/d/0.small.0: wanted 16008 bytes" in found["damage"]


def test_plan_suggest_shows_plan_of_its_guess(here, command):
    for name in ("old", "new"):
        params = {name: {"up": jnp.ones((4, 6)), "down": jnp.ones((6, 4))}}
        optimizer = optax.adam(1e-3).init(params)
        flaxckpt.save(name, {"params": params, "opt_state": optimizer})
    lines = command.text("plan", "old", "new", "--suggest")
    at = lines.index("on the command line:")
    words = shlex.split(lines[at + 1])
    rename = ["--rename", r"params/old/(.*)=params/new/\1"]
    assert words == ["flaxckpt", "plan", "old", "new", *rename]
    planned = command.text(*words[1:])[0]
    assert lines[-2:] == [f"with these transforms, {planned}", SUCCEEDS]
    found = command.json("plan", "old", "new", "--suggest")
    assert found["renames"] == [rename[1].split("=")]
    assert found["plan"]["ok"]
    # The guess leaves out what is no array; the restore does not.
    np.savez("bare.npz", **{"params/old/up": np.ones((4, 6), np.float32)})
    wanted = {"params": {"new": {"up": "float32[4, 6]"}}, "epoch": "int"}
    (here / "wanted.json").write_text(json.dumps(wanted))
    lines = command.text("plan", "bare.npz", "wanted.json", "--suggest", code=1)
    assert lines[-3:-1] == [
        "cannot be restored:",
        "  epoch: wanted a Python int, found nothing",
    ]
    words = pasted(lines, "For a state with values for the missing leaves")
    assert words[-3:] == ["--missing", "init", "--suggest"]
    assert command.json(*words)["ok"]


def test_incomplete_plan_suggest_prints_working_command(here, command):
    save_with_head("base", "head", 10)
    save_with_head("tuned", "head", 3)
    asked = ["plan", "base", "tuned"]
    words = pasted(command.text(*asked, "--suggest", code=1), BEGIN_ANEW)
    assert words == [*asked, "--missing", "init", "--drop", "params/head"]
    assert command.json(*words)["ok"]


def test_plan_suggest_recommends_matching_optimizer(here, command):
    save_with_head("base", "head", 10)
    wanted = {"params": {"trunk": "float32[4, 4]"}, "opt_state": {"n": "int32[]"}}
    (here / "wanted.json").write_text(json.dumps(wanted))
    lines = command.text("plan", "base", "wanted.json", "--suggest", code=1)
    assert pasted(lines, INITIALIZES)[3:] == ["--optimizer", "match", "--suggest"]


def test_plan_reads_output_of_show(here, command):
    (here / "shown.json").write_text(command("show", "run", "--json").stdout)
    assert command.json("plan", "run", "shown.json")["ok"]
    assert not command.json("plan", "orbax", "shown.json", code=1)["ok"]


def test_plan_reads_state_from_file(here, command):
    wanted = {"params": {"dense": {"kernel": "bfloat16[4, 3]"}}}
    (here / "wanted.json").write_text(json.dumps(wanted))
    found = command.json("plan", "run", "wanted.json", "--unused", "ignore")
    assert found["leaves"]["params/dense/kernel"]["actions"] == ["loaded", "cast"]
    (here / "wanted.json").write_text('{"w": "float33[1]"}')
    assert "wanted.json: w must be a string" in command.refuses(
        "plan", "run", "wanted.json"
    )


def test_plan_suggest_guesses_transforms(here, command):
    np.savez(here / "torch.npz", **{"model/up/weight": np.ones((3, 5), np.float32)})
    (here / "wanted.json").write_text('{"params": {"up": {"kernel": "float32[5, 3]"}}}')
    lines = command.text("plan", "torch.npz", "wanted.json", "--suggest")
    assert '            ("model/up/weight", "params/up/kernel", "o e -> e o"),' in lines
    found = command.json("plan", "torch.npz", "wanted.json", "--suggest")
    assert found["ok"]
    assert "remap" in found["code"]
    assert found["leaves"]["params/up/kernel"]["sources"] == ["model/up/weight"]


def test_plan_suggest_exits_with_1_after_incomplete_guess(here, command):
    np.savez(here / "torch.npz", **{"up/weight": np.ones((3, 3), np.float32)})
    (here / "wanted.json").write_text('{"up": {"kernel": "float32[3, 3]"}}')
    lines = command.text("plan", "torch.npz", "wanted.json", "--suggest", code=1)
    assert "ambiguous: 1" in lines
    found = command.json("plan", "torch.npz", "wanted.json", "--suggest", code=1)
    assert [one["leaves"] for one in found["ambiguous"]] == [["up/kernel"]]
    (here / "wanted.json").write_text('{"up": {"kernel": "float32[7]"}}')
    found = command.refuses("plan", "torch.npz", "wanted.json", "--suggest")
    assert "no leaf of the source fits" in found


def test_all_verbs_count_same_leaves(here, command):
    state = {"w": jnp.ones(3), "none": None, "empty": {}, "text": "a", "n": 3}
    for name in ("one", "two"):
        flaxckpt.save(name, state)
    shown = command.text("show", "one")
    assert any(line.split()[:3] == ["(all)", "3", "leaves"] for line in shown)
    assert any(line.split()[:2] == ["none", "None"] for line in shown)
    assert command.text("diff", "one", "two")[-1] == "all 3 leaves are equal"
    assert flaxckpt.verify("one").leaves == 3
    assert ": 3 loaded; " in command.text("plan", "one", "two")[0]
    assert "3 leaves" in repr(flaxckpt.metadata("one"))


def test_show_and_du_list_empty_keys(here, command):
    inner = {"": np.ones(2, "f4"), "c": np.ones(1, "f4")}
    flaxckpt.save("odd", {"": np.ones(3, "f4"), "b": inner})
    rows = [line.split() for line in command.text("show", "odd")[2:]]
    assert rows == [
        ["(all)", "3", "leaves", "24", "B"],
        ["''", "float32[3]", "12", "B"],
        ["b", "2", "leaves", "12", "B"],
        ["''", "float32[2]", "8", "B"],
        ["c", "float32[1]", "4", "B"],
    ]
    rows = [line.split()[:2] for line in command.text("du", "odd")[-5:]]
    assert rows == [["(all)", "3"], ["''", "1"], ["b", "2"], ["b/", "1"], ["b/c", "1"]]
    assert command.text("show", "odd", "b/")[0] == "b/: float32[2]"


def test_single_array_state_has_name_in_tables_and_errors(here, command):
    for name in ("one", "two"):
        flaxckpt.save(name, np.full(3000, len(name) * (name == "two"), "f4"))
    assert command.text("diff", "one", "two", code=1)[3].split()[0] == "(root)"
    lines = command.text("plan", "one", "w.msgpack", code=1)
    assert any(line.startswith("(root)") for line in lines)
    file = largest_file(here / "one/state")
    file.write_bytes(bytes(100) + b"1" + file.read_bytes()[101:])
    with pytest.raises(errors.DamagedCheckpointError, match=r"\n  \(root\): "):
        flaxckpt.load("one")
    assert "1 of 1 leaf cannot be read: (root)" in "\n".join(
        command.text("verify", "one", code=1)
    )
    assert "  (root): " in "\n".join(command.text("diff", "one", "one", code=1))


def test_show_suggests_path_without_extra_slash(here, command):
    assert "did you mean params?" in command.refuses("show", "run", "/params")


# ---- du and doctor ------------------------------------------------------------------


def test_du_lists_space_of_steps_and_arrays(here, command):
    lines = command.text("du", "run", "--depth", 1)
    assert lines[0].split() == ["step", "files", "not", "shared"]
    assert lines[4].endswith(" on the disk")
    assert lines[6] == "arrays of run/300, uncompressed:"
    assert lines[8].split() == ["(all)", "8", "192", "B"]
    found = command.json("du", "run", "--step", 100)
    assert found["shown"] == str(here / "run" / "100")
    assert found["bytes"] == sum(step["own"] for step in found["steps"])
    assert command.text("du", "empty") == ["0 B on the disk"]


def test_du_counts_linked_files_once(here, command):
    frozen = {"frozen": np.arange(150_000.0)}
    with flaxckpt.Checkpointer("linked") as run:
        for step in (1, 2):
            run.save(step, {**frozen, "n": step}).wait()
    first, second = command.json("du", "linked")["steps"]
    assert first["own"] > 1_200_000 > 100_000 > second["own"]
    assert second["bytes"] > 1_200_000


def test_du_reports_single_checkpoint(here, command):
    [found] = command.json("du", "w.msgpack")["steps"]
    size = (here / "w.msgpack").stat().st_size
    assert found == {"step": None, "bytes": size, "own": size}
    assert command.text("du", "w.msgpack")[0].split() == ["files", "not", "shared"]


def test_doctor_accepts_working_directory(here, command):
    found = command.json("doctor", "empty", "--max-mb", 1)
    assert found["ok"]
    assert found["versions"]["jax"] == jax.__version__
    assert found["write_rate"] > 0
    assert found["features"]["file locks"]
    lines = command.text("doctor", "empty", "--max-mb", 1)
    assert any(line.startswith("a small file is durable after") for line in lines)
    assert not [*(here / "empty").iterdir()]
    assert "is not a directory" in command.refuses("doctor", "nowhere")


def test_verify_continues_after_orbax_step_without_arrays(here, command):
    with ocp.CheckpointManager(here / "mixed") as manager:
        for step in (1, 2, 3):
            item = {"w": np.ones(3)}
            args = ocp.args.StandardSave(item) if step != 2 else ocp.args.JsonSave({})
            kinds = {"state": args} if step != 2 else {"config": args}
            manager.save(step, args=ocp.args.Composite(**kinds))
    text = "\n".join(command.text("verify", "mixed", "--all", code=1))
    assert "step 2: not verified: " in text
    assert "2 of 3 steps good; 1 not verified: 2; " in text
    found = command.json("verify", "mixed", "--all", code=1)
    assert [report["ok"] for report in found["reports"]] == [True, True]
    assert list(found["not_verified"]) == ["2"]
    assert not found["ok"]
