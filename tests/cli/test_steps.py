"""Words for steps, directories of runs, and errors in the words of the command line."""

import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import flaxckpt
from flaxckpt.policies import BestN, LatestN
from tests.helpers.files import largest_file


def save(path, losses, keep=(), metric="loss"):
    with flaxckpt.Checkpointer(path, keep=keep) as run:
        for step, loss in losses.items():
            run.save(
                step, {"w": jnp.full(3, step)}, metrics={metric: loss, "acc": step}
            )


@pytest.fixture
def ranked(tmp_path, monkeypatch):
    """A run whose policies rank steps by one metric."""
    monkeypatch.chdir(tmp_path)
    losses = {100: 3.0, 200: 1.0, 300: 2.0}
    save("ranked", losses, [LatestN(9), BestN(1, "loss", "min")])
    return tmp_path


WORDS = {"latest": 300, "best": 200, "best:loss": 200, "best:acc:min": 100, "100": 100}


@pytest.mark.parametrize(("word", "step"), WORDS.items())
def test_every_verb_accepts_words_for_steps(ranked, command, word, step):
    for args in (["show", "ranked", word], ["show", "ranked", "--step", word]):
        assert command.json(*args)["step"] == step
    assert command.text("show", "ranked", word, "w")[0].startswith("w: ")
    assert command.json("du", "ranked", "--step", word)["shown"].endswith(f"/{step}")
    assert command.json("explain", "ranked", word)["step"] == step
    for args in (["verify", "ranked", word], ["verify", "ranked", "-s", word]):
        [report] = command.json(*args)["reports"]
        assert report["step"] == step
    assert command.json("pin", "ranked", word)["steps"] == [step]
    assert command.json("unpin", "ranked", word)["steps"] == [step]
    planned = command.json(
        "plan", "ranked", "ranked", "-s", word, "--target-step", word
    )
    assert planned["path"].endswith(f"/{step}")
    command("convert", "ranked", "out", "--step", word)
    assert float(flaxckpt.load("out")["w"][0]) == step
    other = 200 if step == 100 else 100
    for args in (["ranked", word, other], ["ranked", "-a", word, "-b", other]):
        found = command.json("diff", *args, code=1)
        assert (found["a"], found["b"]) == (
            str(ranked / "ranked" / str(step)),
            str(ranked / "ranked" / str(other)),
        )
    found = command.json("diff", "ranked", other, "ranked", word, code=1)
    assert found["b"].endswith(f"/{step}")
    found = command.json("report", "ranked", "-a", other, "-b", word)
    assert found["path"].endswith("/ranked")


def test_best_excludes_damaged_steps(ranked, command):
    file = largest_file(ranked / "ranked" / "200")
    file.write_bytes(file.read_bytes()[:-1])
    assert command.json("show", "ranked", "best")["step"] == 300


@pytest.mark.parametrize(
    ("keep", "word", "said"),
    [
        ([], "best", "records no metric that ranks its steps: write best:METRIC:min"),
        (
            [],
            "best:acc",
            "write best:acc:min or best:acc:max; the steps have acc, loss",
        ),
        ([], "best:los", "has a metric 'los'; the steps have acc, loss"),
        ([], "best:los:min", "has a finite metric 'los'; the steps have acc, loss"),
        (
            [BestN(1, "loss", "min"), BestN(1, "acc", "max")],
            "best",
            "by several metrics: write best:loss or best:acc",
        ),
    ],
)
def test_rejects_unknown_best_step(tmp_path, monkeypatch, command, keep, word, said):
    monkeypatch.chdir(tmp_path)
    save("run", {1: 1.0, 2: 2.0}, [LatestN(9), *keep])
    for args in (["show", "run", word], ["pin", "run", word], ["diff", "run", word]):
        assert said in command.refuses(*args)


def test_error_for_invalid_step_lists_valid_forms(ranked, command):
    for args in (
        ["verify", "ranked", "foo"],
        ["show", "ranked", "--step", "-1"],
        ["pin", "ranked", "1.5"],
    ):
        wanted = "must be a number, latest, best, or best:METRIC, found"
        assert wanted in command.refuses(*args)
    assert "write --step best" in command.refuses("du", "ranked", "best")
    for step in ("latest", "0"):
        told = command.refuses("convert", "ranked", step, "out")
        assert f"found also 'out': for a step, write --step {step}" in told
    assert "leave latest out" in command.refuses("verify", "ranked/100", "latest")


@pytest.mark.parametrize("word", ["best", "latest", "3"])
def test_rejects_steps_of_single_checkpoint(ranked, command, word):
    said = command.refuses("show", "ranked/100", word)
    assert " checkpoint" in said
    assert "neither" not in said
    assert (
        said.splitlines()
        == command.refuses("show", "ranked/100", "--step", word).splitlines()
    )


def test_leaf_takes_precedence_over_step_of_same_name(tmp_path, monkeypatch, command):
    monkeypatch.chdir(tmp_path)
    with flaxckpt.Checkpointer("run") as run:
        for step in (0, 1, 2):
            run.save(step, ({"w": np.ones(2)}, {"w": np.ones(3)}))
    assert command.text("show", "run", "0/w")[0] == "0/w: float64[2]"
    assert command.text("show", "run", "1")[1].split()[0] == "1"
    assert command.text("show", "run", "2", "1/w")[0] == "1/w: float64[3]"
    assert command.json("show", "run", "2")["step"] == 2
    assert "nowhere is not a step" in command.refuses("show", "run", "nowhere", "0/w")


def test_error_names_nearest_steps(tmp_path, monkeypatch, command):
    monkeypatch.chdir(tmp_path)
    save("run", dict.fromkeys(range(10, 200, 10), 1.0))
    said = "has no step 91: it has 19 steps, the nearest 80, 90, 100, 110"
    for args in (
        ["show", "run", 91],
        ["verify", "run", 91],
        ["pin", "run", 91],
        ["diff", "run", 91],
        ["convert", "run", "out", "--step", 91],
    ):
        assert said in command.refuses(*args)
    with flaxckpt.Checkpointer("run") as run:
        for call in (run.metrics, run.delete, run.metadata, run.verify):
            with pytest.raises(FileNotFoundError, match=re.escape(said)):
                call(91)


def test_every_verb_reports_missing_path(ranked, command):
    for args in (
        ["ls", "nowhere"],
        ["show", "nowhere"],
        ["show", "nowhere", "best"],
        ["diff", "nowhere"],
        ["diff", "nowhere", "nowhere"],
        ["diff", "ranked", "nowhere"],
        ["diff", "ranked", 100, "nowhere", 100],
        ["verify", "nowhere", "--all"],
        ["plan", "nowhere", "ranked"],
        ["plan", "ranked", "nowhere"],
        ["convert", "nowhere", "out"],
        ["explain", "nowhere"],
        ["prune", "nowhere"],
        ["pin", "nowhere", "latest"],
        ["du", "nowhere"],
        ["report", "nowhere"],
    ):
        said = command.refuses(*args)
        assert "there is no checkpoint at" in said
        assert "nowhere: the path does not exist" in said
    assert "did you mean" in command.refuses("show", "ranket")


def test_reports_run_without_steps(tmp_path, monkeypatch, command):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    with flaxckpt.Checkpointer("begun", metadata={"note": 1}) as run:
        run.events.emit("configured")
    for path in ("empty", "begun"):
        for verb in (["show"], ["verify"], ["convert", "out"], ["diff", "out"]):
            said = command.refuses(verb[0], path, *verb[1:])
            assert "has no steps yet" in said
            assert "supported format" not in said


def test_errors_name_command_line_options(ranked, command):
    command("convert", "ranked", "out")
    said = command.refuses("convert", "ranked", "out")
    assert "pass --overwrite" in said
    assert "overwrite=" not in said
    said = command.refuses("convert", "ranked", "out.foo")
    assert "a directory of --format orbax, or pass --format" in said
    assert ".safetensors or .msgpack" in said
    said = command.refuses("convert", "ranked", "out.msgpack", "-f", "safetensors")
    assert "pass --format msgpack" in said
    assert "--items" in command.refuses(
        "convert", "ranked", "x.msgpack", "--items", "a,b"
    )


@pytest.mark.parametrize("name", ["out.foo", "out.ckpt", "model.v2"])
def test_convert_rejects_unknown_suffix(ranked, name):
    with pytest.raises(flaxckpt.errors.OptionError, match="names no format"):
        flaxckpt.convert("ranked", name)
    flaxckpt.convert("ranked", name, format="orbax")
    assert jax.tree.leaves(flaxckpt.load(name))


def test_convert_ignores_dots_within_names(ranked):
    for name in ("step_1.5", "Llama-3.2-1B"):
        flaxckpt.convert("ranked", name)
        assert jax.tree.leaves(flaxckpt.load(name))


def test_ls_lists_directory_of_runs(tmp_path, monkeypatch, command):
    monkeypatch.chdir(tmp_path)
    save("runs/a", {1: 3.0, 2: 1.0, 3: 2.0}, [LatestN(9), BestN(1, "loss", "min")])
    save("runs/deep/b", {7: 1.0})
    flaxckpt.save("runs/one", {"w": np.ones(2)})
    header, *rows, last = command.text("ls", "runs")
    titles = ["run", "verdict", "best", "loss", "steps", "newest", "saved", "size"]
    assert header.split() == titles
    assert [row.split()[:2] for row in rows] == [
        ["a", "healthy"],
        ["deep/b", "healthy"],
        ["one", "healthy"],
    ]
    assert "  1 at 2  " in rows[0]
    assert last.startswith("2 runs and 1 checkpoint, ")
    assert last.endswith("; by the best loss, lowest first")
    keep = [LatestN(9), BestN(1, "loss", "min")]
    save("runs/z", {1: 0.5, 2: float("nan")}, keep)
    ranked = command.text("ls", "runs")[1:-1]
    assert [row.split()[0] for row in ranked] == ["z", "a", "deep/b", "one"]
    assert "  diverged at 2  " in ranked[0]
    shutil.rmtree("runs/z")
    save("runs/c", {4: 5.0}, [BestN(1, "loss", "max")])
    long = "x" * 500
    save("runs/other", {1: 9.0}, [BestN(1, long, "min")], metric=long)
    header, *rows, _ = command.text("ls", "runs")
    assert header.split() == [*titles[:3], *titles[4:]]
    assert "  loss 1 at 2  " in rows[0]
    assert "  loss 1 at 7  " in rows[1], "no policy ranks its steps"
    assert "  loss 5 at 4  " in rows[2]
    assert max(map(len, rows)) < 120
    shutil.rmtree("runs/c")
    shutil.rmtree("runs/other")
    (tmp_path / "runs/a/3/state/d/0.small.0").unlink()
    found = command.json("ls", "runs", code=1)["runs"]
    assert [run["newest"] for run in found] == [7, 2, None]
    assert [run["damaged"] for run in found] == [[], [3], []], "as good, but damaged"
    assert found[1]["best"] == {"loss": {"step": 2, "value": 1.0}}
    assert found[1]["bytes"] > 0
    assert found[1]["verdict"] == "1 damaged step: 3"
    assert "needs one of them" in command.refuses("ls", "runs", "-n", 1)


def test_ls_sorts_runs_and_says_which_have_no_steps(tmp_path, monkeypatch, command):
    monkeypatch.chdir(tmp_path)
    for name, loss, speed in (("a", 1.0, 5.0), ("b", 2.0, 7.0), ("c", 3.0, 6.0)):
        with flaxckpt.Checkpointer(tmp_path / "runs" / name) as run:
            run.save(1, {"w": np.ones(2)}, metrics={"loss": loss, "speed": speed})
    (tmp_path / "runs/logs").mkdir()  # no run, as on the page
    with flaxckpt.Checkpointer(tmp_path / "runs/new") as run:
        run.save(1, {"w": np.ones(2)}).wait()
        run.delete(1)
    for key, wanted in (
        ("loss", "abc"),
        ("speed", "acb"),
        ("max:speed", "bca"),
        ("saved", "abc"),
    ):
        *rows, last = command.text("ls", "runs", "--sort", key)[1:]
        assert [row.split()[0] for row in rows if "healthy" in row] == [*wanted]
        assert last.endswith(f"{key}, lowest first") or ":" in key or key == "saved"
        assert any(row.split()[:4] == ["new", "no", "steps", "0"] for row in rows)
        assert len(rows) == 4
    assert "the metrics are loss, speed" in command.refuses("ls", "runs", "--sort", "x")
