"""The screens of the verbs on terminals of 80 and 140 columns."""

import itertools
import os
import pty
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import rich.console
from flax.training import train_state

import flaxckpt
from flaxckpt.policies import BestN, LatestN
from tests.helpers import chunks, programs

COMMAND = [sys.executable, "-m", "flaxckpt"]
POLICIES = ["-k", "latest:3", "-k", "best:1:eval/loss:min", "-k", "every:1000"]
WIDTHS = [80, 140]


@pytest.fixture
def terminal(command, monkeypatch):
    """Returns the lines of a verb on a terminal, without colors."""
    monkeypatch.setenv("FORCE_COLOR", "1")

    def run(width, *args, code=0):
        monkeypatch.setenv("COLUMNS", str(width))
        return [plain(line) for line in command.text(*args, code=code)]

    return run


def plain(line):
    return re.sub("\x1b\\[[0-9;]*[A-Za-z]", "", line)


@pytest.fixture(scope="module")
def _losses(tmp_path_factory):
    root = tmp_path_factory.mktemp("losses")
    with flaxckpt.Checkpointer(root / "run") as run:
        for n in range(40):
            loss = 2.3 + 1e-3 * np.cos(n / 3)
            run.save(
                (n + 1) * 100,
                {"params": {"w": np.full((4, 4), n, np.float32)}},
                metrics={
                    "train/loss": loss - 0.1,
                    "eval/loss": loss,
                    "eval/accuracy": 0.71 + n / 1e4,
                },
            )
    return root


@pytest.fixture
def losses(_losses, tmp_path, monkeypatch):
    """A run of forty steps; the losses of its steps differ in the fourth decimal."""
    shutil.copytree(_losses, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_paragraphs_and_bars_fit_narrow_terminal(losses, terminal):
    values = np.random.default_rng(0).normal(size=5000).astype(np.float32)
    flaxckpt.save("normal", {"w": values})
    shown = terminal(60, "show", "normal", "w")
    assert max(map(len, shown)) <= 60
    [start] = [n for n, line in enumerate(shown) if line.split()[:2] == ["from", "to"]]
    assert sum(map(len, shown[start].split())) == len("fromtocount")
    bars = [line.split() for line in shown[start + 1 :]]
    assert all(len(bar) == 4 or bar[2:] == ["0"] for bar in bars), "none is wrapped"
    best = terminal(60, "explain", "run", 2900, *POLICIES)
    [first] = [n for n, line in enumerate(best) if line.startswith("  lowest")]
    assert len(best[first:]) > 1
    assert all(line.startswith("  ") for line in best[first:])
    name = "a/very/long/name/" * 30
    with flaxckpt.Checkpointer("named", keep=[BestN(1, name, "min")]) as run:
        for step in (1, 2, 3):
            run.save(step, {"w": np.ones(2)}, metrics={name: 1 / step})
    lines = terminal(80, "top", "named", "--once")
    assert max(map(len, lines)) <= 80
    assert lines[1].startswith("  (a/very"), "the verdict is wrapped"


def test_top_fits_curves_and_keeps_units_beside_numbers(losses, terminal):
    for width in range(46, 62, 3):
        lines = terminal(width, "top", "run", "--once")
        assert max(map(len, lines)) <= width
        curves = [line for line in lines if "→" in line]
        assert len(curves) == 3
        assert all(
            re.search("[▁-█]{3,}  2?.*[0-9] → [0-9.]+$", line) for line in curves
        )
        pairs = itertools.pairwise(lines)
        split = [
            (line, after)
            for line, after in pairs
            if line[-1].isdigit() and re.match(" *(ms|s|min|B|kB|MB)\\b", after)
        ]
        assert not split


def test_table_of_runs_leaves_out_last_columns_on_narrow_terminal(losses, terminal):
    wide = terminal(90, "ls", ".", *POLICIES)
    assert wide[0].split()[-4:] == ["steps", "newest", "saved", "size"]
    for width in (57, 66, 72):
        narrow = terminal(width, "ls", ".", *POLICIES)
        assert max(map(len, narrow)) <= width
        table = narrow[:2]
        assert all(
            line.startswith(short) for line, short in zip(wide, table, strict=False)
        )
        assert "healthy" in table[1]


def test_table_of_runs_folds_long_names_first(tmp_path, terminal):
    for name in ("a", "b" * 200):
        with flaxckpt.Checkpointer(tmp_path / name) as run:
            run.save(1, {"w": np.ones(2)}, metrics={"loss": 1.0})
    header, first, *long, _ = terminal(90, "ls", tmp_path)
    assert header.split() == ["run", "verdict", "steps", "newest", "saved", "size"]
    assert first.split()[:3] == ["a", "healthy", "1"]
    assert "".join(line.split()[0] for line in long) == "b" * 200


def test_suggestion_fits_narrow_terminal(tmp_path, terminal, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, part in (("old", "encoder"), ("new", "backbone")):
        params = {part: {"kernel": jnp.ones((4, 6)), "bias": jnp.ones(6)}}
        flaxckpt.save(name, {"params": params})
    lines = terminal(60, "plan", "old", "new", "--suggest")
    long = [line for line in lines if len(line) > 60]
    pasted = ("flaxckpt plan", "transforms = ", "rename(", '("params')
    others = [line for line in long if not line.strip().startswith(pasted)]
    assert all(len(line.split()) == 1 for line in others), others
    assert any("--rename" in line for line in long)


# ---- ls ---------------------------------------------------------------------------


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("policies", [[], POLICIES])
def test_ls_prints_line_per_step_and_column_per_metric(
    losses, terminal, width, policies
):
    lines = terminal(width, "ls", "run", *policies)
    assert len(lines) == 1 + 40 + 1
    assert all(len(line) <= width for line in lines)
    metrics = ["train/loss", "eval/loss", "eval/accuracy"]
    if policies:
        metrics.insert(0, metrics.pop(1))  # ranked first
    assert lines[0].split() == ["step", "saved", "size", *metrics, "marks"]
    shown = [line.split()[5 if policies else 6] for line in lines[1:-1]]
    assert len(set(shown)) == 40  # the digits tell all losses apart
    if policies:
        [best] = [line for line in lines if "  best" in line]
        loss = min(shown, key=float)
        assert loss in best
        assert best.split()[0] == str((shown.index(loss) + 1) * 100)


def test_ls_abbreviates_reasons(losses, terminal):
    lines = terminal(140, "ls", "run", "-n", "3", *POLICIES)
    assert lines[-2].endswith("  latest, latest 3, every 1000")
    assert lines[-3].endswith("  latest 3")
    assert lines[-1].startswith("the newest 3 of 40 steps, flaxckpt, ")
    narrow = terminal(80, "ls", "run", "-n", "3", *POLICIES)
    assert narrow[-2].endswith("  latest +2")
    assert terminal(140, "ls", "run", *POLICIES)[1].endswith("  to be deleted")


def test_ls_counts_metrics_beyond_width(losses, terminal, command):
    long = "eval/loss_on_a_very_long_validation_set"
    with flaxckpt.Checkpointer("many") as run:
        metrics = {f"metric_{n}": n + 0.5 for n in range(50)} | {long: 0.25}
        run.save(1, {"w": np.ones(2)}, metrics=metrics).wait()
    fitting = []
    for width in WIDTHS:
        lines = terminal(width, "ls", "many")
        assert len(lines) == 3
        assert max(map(len, lines[:2])) <= width
        fitting.append(count := lines[0].count("metric_"))
        assert f"; +{51 - count} more metrics: metric_{count}, " in lines[-1]
    assert 3 <= fitting[0] < fitting[1]
    ranked = terminal(80, "ls", "many", "-k", f"best:1:{long}:min")
    assert "eval/loss_o…lidation_set" in ranked[0]
    assert command.json("ls", "many")["steps"][0]["metrics"] == metrics


def test_ls_marks_best_step_of_each_ranking(losses, terminal, command):
    ranked = ["-k", "best:2:eval/loss:min", "-k", "best:1:eval/accuracy:max"]
    lines = terminal(140, "ls", "run", *ranked)
    [best] = [line for line in lines if line.endswith("  best eval/loss")]
    assert sum(line.endswith("  among 2 best eval/loss") for line in lines) == 1
    assert lines[-2].endswith("  latest, best eval/accuracy")
    found = command.json("ls", "run", *ranked)["best"]
    assert found == {"eval/loss": int(best.split()[0]), "eval/accuracy": 4000}


@pytest.mark.parametrize("width", WIDTHS)
def test_ls_wraps_damage_lines_between_words(losses, terminal, width):
    for file in (losses / "run" / "4000" / "state").rglob("*"):
        if file.is_file():
            file.write_bytes(file.read_bytes()[:-1])
    lines = terminal(width, "ls", "run", "-n", 2, code=1)
    assert max(map(len, lines)) <= width
    [first] = [n for n, line in enumerate(lines) if "is damaged: " in line]
    assert lines[first].startswith("step 4000 is damaged: 4000 is incomplete;")
    assert all(line.startswith("  ") for line in lines[first + 1 : -1])
    verified = terminal(80, "verify", "run", 4000, code=1)
    assert max(map(len, verified)) <= 80


def test_wraps_sentences_to_terminal_width(losses, terminal):
    keep = [LatestN(9), *(BestN(n, "eval/loss", "min") for n in range(1, 9))]
    with flaxckpt.Checkpointer("run", keep=keep) as run:
        run.save(4100, {"w": 1.0}, metrics={"eval/loss": 3.0})
    (losses / "run/4100/state/more.txt").write_text("x")
    for args in (
        ["explain", "run"],
        ["explain", "run", 2000],
        ["prune", "run"],
        ["verify", "run"],
        ["verify", "run", "--all"],
    ):
        lines = terminal(60, *args)
        assert max(map(len, lines)) <= 60, lines


def test_ls_sorts_by_metric(losses, terminal, command):
    lines = terminal(80, "ls", "run", "--sort", "eval/loss")
    shown = [float(line.split()[5]) for line in lines[1:-1]]
    assert shown == sorted(shown)
    newest = terminal(80, "ls", "run", "--sort", "eval/loss", "-n", "5")
    steps = [int(line.split()[0]) for line in newest[1:-1]]
    assert sorted(steps) == [3600, 3700, 3800, 3900, 4000] != steps
    for key in ("saved", "size", "step"):
        assert len(terminal(80, "ls", "run", "--sort", key)) == 42
    refused = command.refuses("ls", "run", "--sort", "loss")
    assert "the metrics are train/loss, eval/loss, eval/accuracy" in refused


@pytest.mark.parametrize(
    ("values", "shown"),
    [
        ([1.0, 0.5, 1 / 3], ["1.0000", "0.5000", "0.3333"]),
        ([3.0, 1.0, None], ["3", "1", ""]),
        ([2.2999, 2.29991, 2.3], ["2.29990", "2.29991", "2.30000"]),
        ([1e-6, 1.00001e-6], ["1e-06", "1.00001e-06"]),
        ([1e9, 1.0005e9], ["1e+09", "1.0005e+09"]),
        ([0.5, float("nan"), float("-inf")], ["0.5", "NaN", "-inf"]),
        ([0.00025, 3.0], ["0.00025", "3.00000"]),
        ([0.25, 0.25 + 1e-17], ["0.25", "0.25"]),
        ([1 / 3, 1 / 3 + 1e-15], ["0.333333333333"] * 2),
    ],
)
def test_columns_use_enough_digits_to_distinguish_numbers(
    tmp_path, terminal, values, shown
):
    with flaxckpt.Checkpointer(tmp_path) as run:
        for step, value in enumerate(values):
            metrics = {} if value is None else {"m": value}
            run.save(step, {"w": 1}, metrics=metrics)
    lines = sorted(terminal(140, "ls", tmp_path)[1:-1])
    cells = [(line.split()[5:6] or [""])[0] for line in lines]
    assert [cell.replace("latest", "") for cell in cells] == shown


# ---- ls --watch --------------------------------------------------------------------


def test_ls_watch_prints_each_new_step_until_ctrl_c(tmp_path):
    with flaxckpt.Checkpointer(tmp_path / "run") as run:
        for step in (1, 2, 3):
            run.save(step, {"w": np.ones(2)}, metrics={"loss": 1 / step}).wait()
        words = ("ls", "--watch", tmp_path / "run", "-n", 2)
        watch = programs.start("-m", "flaxckpt", *words)
        first = [watch.stdout.readline() for _ in range(2)]
        run.save(4, {"w": np.ones(2)}, metrics={"loss": 0.25}).wait()
        last = watch.stdout.readline()
    watch.send_signal(signal.SIGINT)
    rest, errors = watch.communicate()
    assert [line.split()[0] for line in first] == ["2", "3"]
    assert last.startswith("4  ")
    assert "  loss=0.25  latest" in last
    assert (watch.returncode, rest, errors) == (0, "", "")


def test_ls_watch_redraws_terminal(tmp_path):
    with flaxckpt.Checkpointer(tmp_path / "run", keep=[LatestN(2)]) as run:
        run.save(1, {"w": np.ones(2)}).wait()
        parent, child = pty.openpty()
        watch = subprocess.Popen(
            [*COMMAND, "ls", "-w", tmp_path / "run"],
            stdout=child,
            stderr=child,
            env=os.environ | {"COLUMNS": "80", "LINES": "24", "TERM": "xterm"},
        )
        os.close(child)
        drawn = read_until(parent, "1 step, flaxckpt")
        assert "\x1b[3A" not in drawn
        run.save(2, {"w": np.zeros(2)}).wait()
        drawn = read_until(parent, "2 steps, flaxckpt")
    assert "\x1b[3A\x1b[J" in drawn  # over the three lines before
    for file in (tmp_path / "run" / "2" / "state").rglob("*"):
        if file.is_file():
            file.write_bytes(file.read_bytes()[:-1])
    drawn = read_until(parent, "step 2 is damaged: ", "2 steps (1 damaged), flaxckpt")
    lines = plain(drawn.rpartition("\x1b[J")[2]).splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[4].startswith("  "), "the damage takes two lines"
    with flaxckpt.Checkpointer(tmp_path / "run") as run:
        run.save(3, {"w": np.ones(2)}).wait()
    drawn = read_until(parent, "3 steps, flaxckpt")
    assert f"\x1b[{len(lines)}A\x1b[J" in drawn, "drawn over all lines before"
    watch.send_signal(signal.SIGINT)
    assert watch.wait() == 0
    os.close(parent)


def read_until(terminal, *texts):
    """Reads the output on a terminal until it contains `texts`, in this order."""
    wanted = re.compile(".*".join(map(re.escape, texts)), re.DOTALL)
    output, end = "", time.monotonic() + 60
    while not wanted.search(output) and time.monotonic() < end:
        output += os.read(terminal, 4096).decode()
    assert wanted.search(output), output
    return output


def test_ls_watch_rejects_json(losses, command):
    assert "leave --json out" in command.refuses("ls", "run", "--watch", "--json")


# ---- diff ---------------------------------------------------------------------------


def layered_state(value, layers=12):
    """A state with an optimizer; later layers change more with `value`."""
    params = {
        f"layers_{n}": {
            "attn": {"kernel": jnp.full((4, 4), 1 + n * value)},
            "mlp": {"kernel": jnp.full((4, 8), 1 + n * value)},
        }
        for n in range(layers)
    }
    params["embed"] = {"embedding": jnp.full((8, 4), 1 + value)}
    tx = optax.adamw(1e-3)
    state = train_state.TrainState.create(apply_fn=print, params=params, tx=tx)
    moments = jax.tree.map(lambda x: x + int(value), state.opt_state)
    return state.replace(step=int(value * 10), opt_state=moments)


@pytest.fixture(scope="module")
def _layered(tmp_path_factory):
    root = tmp_path_factory.mktemp("layered")
    with flaxckpt.Checkpointer(root / "run") as run:
        for step in (1, 2):
            run.save(step, layered_state(float(step)))
    flaxckpt.save(root / "small", layered_state(1.0, layers=3))
    return root


@pytest.fixture
def layered(_layered, tmp_path, monkeypatch):
    """A run whose steps 1 and 2 differ; another of fewer layers."""
    shutil.copytree(_layered, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("width", WIDTHS)
def test_diff_sorts_params_first_and_by_change(layered, terminal, width):
    lines = terminal(width, "diff", "run", "-a", 1, "-b", 2, "--limit", 100, code=1)
    assert all(len(line) <= width for line in lines)
    paths = [line.split()[0] for line in lines[3:-1]]
    assert len(paths) == 75
    tops = [path.split("/")[0] for path in paths]
    assert tops == sorted(tops, key=["step", "params", "opt_state"].index)
    params = [line for line in lines if line.startswith("params/")]
    norms = [float(line.split()[-1]) for line in params]
    assert norms == sorted(norms, reverse=True)
    assert norms[0] > 1.5 * norms[-1]


def test_diff_limits_rows(layered, terminal):
    lines = terminal(80, "diff", "run", "-a", 1, "-b", 2, "--limit", 3, code=1)
    assert len(lines) == 3 + 3 + 2
    assert lines[-2] == "… and 72 more: --limit 75 shows all"


def test_diff_reads_only_selected_leaves(layered, command):
    asked = ["diff", "run", "-a", 1, "-b", 2, "--only", "params/.*/attn/.*"]
    found = command.json(*asked, code=1)
    assert len(found["changed"]) + len(found["same"]) == 12
    assert all("/attn/" in path for path in found["changed"])
    assert found["bytes_compared"] == 12 * 64
    refused = command.refuses("diff", "run", "-a", 1, "-b", 2, "--only", "attn")
    assert "matches no leaf (it must match a whole leaf path)" in refused
    assert "not a valid regular expression" in command.refuses(
        "diff", "run", "-a", 1, "-b", 2, "--only", "("
    )


def test_diff_by_subtree_adapts_depth_to_limit(layered, terminal):
    asked = ["diff", "run", "-a", 1, "-b", 2, "--by-subtree"]
    lines = terminal(80, *asked, "--limit", 20, code=1)
    rows = {line.split()[0]: line.split() for line in lines[3:-1]}
    assert [*rows][-1] == "opt_state/0"
    assert rows["params/layers_11"][1:5] == ["2", "of", "2", "48"]
    assert rows["opt_state/0"][1:4] == ["51", "of", "51"]
    few = terminal(80, *asked, "--limit", 4, code=1)
    assert [line.split()[0] for line in few[3:-1]] == ["step", "params", "opt_state"]
    deep = terminal(140, *asked, "--limit", 1000, code=1)
    names = {line.split()[0] for line in deep[3:-1]}
    assert names >= {"step", "params/layers_1/attn", "opt_state/0/mu/layers_1/attn"}
    assert not [name for name in names if name.endswith("kernel")], (
        "a row per container"
    )


@pytest.mark.parametrize("width", WIDTHS)
def test_diff_shows_metrics_and_unreadable_leaves(losses, terminal, command, width):
    asked = ["diff", "run", 100, 200]
    chunks.flip(Path("run/200/state"), "params.w/c.0.0")
    lines = terminal(width, *asked, code=1)
    assert max(map(len, lines)) <= width
    assert lines[2].split() == ["metric", "a", "b"]
    names = [line.split()[0] for line in lines[3:6]]
    assert names == ["train/loss", "eval/loss", "eval/accuracy"]
    assert lines[5].split()[1:] == ["0.7100", "0.7101"]
    at = lines.index("cannot be read, and so may differ:")
    assert lines[at + 1].startswith("  params/w: in step 200: ")
    assert lines[-1] == "0 leaves differ, 0 are equal, 1 cannot be read"
    found = command.json(*asked, code=1)
    assert not found["equal"]
    assert set(found["unreadable"]) == {"params/w"}
    assert found["metrics"]["eval/loss"][0] == pytest.approx(2.301)


# ---- plan ---------------------------------------------------------------------------


@pytest.mark.parametrize("width", WIDTHS)
def test_plan_folds_similar_layers(layered, terminal, width):
    lines = terminal(width, "plan", "run", "small")
    assert all(len(line) <= width for line in lines[1:])
    attn = "params/layers_{3..11}/attn/kernel"
    [row] = [line for line in lines if line.startswith(attn)]
    assert row.split()[:5] == [attn, "9", "dropped", "-", "float32[4,"]
    assert sum(line.startswith("params/") for line in lines) == 2


def test_plan_of_equal_state_prints_no_table(layered, terminal):
    text = "".join(terminal(80, "plan", "run", "run"))
    assert re.search(r"; [\d.]+ k?B to read.{0,4}The restore would succeed", text)
    assert not set(text) & set("┏━│")


@pytest.mark.parametrize("width", [60, 80, 140])
def test_plan_folds_long_cells_without_losing_text(layered, terminal, width):
    flaxckpt.save("large", layered_state(1.0, layers=20))
    lines = terminal(width, "plan", "run", "large", code=1)
    assert all(len(line) <= width for line in lines)
    text = "".join("".join(line.split()) for line in lines)
    assert "16leavescannotberestored" in text
    wide = terminal(300, "plan", "run", "large", code=1)
    assert sorted("".join(wide).replace(" ", "")) == sorted(text)
    kernel = "opt_state/0/mu/layers_{12..19}/attn/kernel"
    assert any(line.split()[:2] == [kernel, "8"] for line in wide)


@pytest.mark.parametrize("width", WIDTHS)
def test_plan_prints_pastable_renames_on_one_line(tmp_path, terminal, width):
    long = "the_encoder_of_a_model_with_quite_long_names_of_modules"
    for name, part in (("old", long), ("new", "encoder")):
        params = {part: {"kernel": jnp.ones((4, 4)), "bias": jnp.ones(4)}}
        flaxckpt.save(tmp_path / name, {"params": params})
    asked = "plan", tmp_path / "old", tmp_path / "new"
    lines = terminal(width, *asked, code=1)
    assert "To rename the leaves:" in lines
    [line] = [line for line in lines if "--rename" in line]
    words = shlex.split(line)
    assert words[:4] == ["flaxckpt", *map(str, asked)]
    assert terminal(width, *words[1:])
    python = " ".join(lines[lines.index(line) + 1 :])
    assert python.startswith("In Python: Pass transforms=[rename(")


def test_plan_does_not_break_types(tmp_path, terminal):
    for name, size in (("old", 1024), ("new", 4096)):
        inner = {"a_long_name_of_a_layer/attention/query": jnp.ones((32, size))}
        flaxckpt.save(tmp_path / name, {f"a_long_name_of_{'x' * 30}": inner})
    lines = terminal(80, "plan", tmp_path / "old", tmp_path / "new", code=1)
    text = "\n".join(lines)
    assert max(len(line) for line in lines[1:] if "--" not in line) <= 80
    assert "float32[32, 4096]" in text
    assert "float32[32, 1024]" in text


def test_plan_breaks_paths_at_slashes(layered):
    flaxckpt.save("moved", {"state": layered_state(1.0)})
    rename = flaxckpt.transforms.rename("state/(.*)", r"\1")
    plan = flaxckpt.plan("moved", layered_state(1.0), transforms=[rename])
    console = rich.console.Console(width=70)
    with console.capture() as captured:
        console.print(plan)
    words = captured.get().split()
    for part in ("params/", "attn/kernel", "state/step"):
        assert part in words, captured.get()
    assert " from state/" in str(plan)


def test_plan_lists_missing_leaves_first_with_nearest_leaf(layered, terminal, command):
    (layered / "wanted.json").write_text(
        '{"params": {"embed": {"embeding": "float32[8, 4]"}}}'
    )
    lines = terminal(140, "plan", "run", "wanted.json", code=1)
    assert lines[2].split()[:2] == ["params/embed/embeding", "missing"]
    assert "nothing (nearest: params/embed/embedding)" in lines[2]
    assert "1 leaf cannot be restored" in lines
    assert lines[-1].startswith("In Python: Pass a state with only the")
    refused = terminal(140, "plan", "run", "small", "--unused", "error", code=1)
    assert "cannot be restored:" in "".join(refused)


# ---- verify ------------------------------------------------------------------------


@pytest.fixture
def damaged(tmp_path, monkeypatch):
    """A run of three steps; one chunk of an array of the second is damaged."""
    monkeypatch.chdir(tmp_path)
    layout = flaxckpt.ArrayLayout(chunk_bytes=2**15)
    with flaxckpt.Checkpointer("run", layout=layout) as run:
        for step in (1, 2, 3):
            values = np.random.default_rng(step).normal(size=(512, 64))
            run.save(step, {"params": {"Dense_0": {"kernel": values}}, "n": values[0]})
    chunks.flip(tmp_path / "run/2/state", "params.Dense_0.kernel/c.1.0")
    return tmp_path


def test_verify_reports_damaged_rows_of_leaf(damaged, terminal):
    lines = terminal(80, "verify", "run", "--all", code=1)
    rows = lines[2].partition(", rows ")[2]
    assert lines[1] == "  1 of 2 leaves cannot be read: params/Dense_0/kernel"
    assert lines[2] == ("  state/d/0.small.0 -> params/Dense_0/kernel, rows " + rows)
    start, stop = re.fullmatch(r"(\d+)-(\d+) of 512", rows).groups()
    assert int(stop) + 1 == 2 * int(start)
    assert lines[3] == "    c.1.0 has changed since it was written: its CRC-32C differs"
    assert lines[4].startswith("2 of 3 steps good; 1 DAMAGED: 2; ")
    assert " ".join(lines[5:]) == (
        "not marked as damaged: policies count step 2, and restores may try it"
        " To update the marks: flaxckpt verify run --all --mark"
    )
    report = flaxckpt.verify("run", step=2)
    assert report.places == {"params/Dense_0/kernel": lines[2].strip()}
    assert lines[2].strip() in str(report)


@pytest.mark.parametrize("width", [80, 60, 40])
def test_diff_does_not_truncate_numbers(terminal, tmp_path, monkeypatch, width):
    monkeypatch.chdir(tmp_path)
    kernels = np.full((16, 4), 3.0, np.float32), np.ones((16, 6), np.float32)
    for n, kernel in enumerate(kernels, 1):
        head = {"query_projection": {"kernel": kernel}}
        body = {"layer_0": {"attention": {"query_projection": np.full(4, n + n / 7)}}}
        flaxckpt.save(str(n), {"params": {"head": head, **body}, "n": np.int32(n)})
    wide = terminal(200, "diff", "1", "2", code=1)
    lines = terminal(width, "diff", "1", "2", code=1)
    found = re.findall(r"\d+\.\d+|\d+ of \d+", "\n".join(wide))
    assert found
    assert re.findall(r"\d+\.\d+|\d+ of \d+", "\n".join(lines)) == found
    assert "rel. norm" in "\n".join(lines)
    paths = "".join(line.split(" ")[0] for line in lines)
    if width >= 60:
        assert "params/head/query_projection/kernel" in paths


@pytest.mark.parametrize("width", [120, 80, 40])
def test_tables_do_not_break_words(terminal, monkeypatch, width):
    short = Path(tempfile.mkdtemp())  # paths in titles fit in a line
    monkeypatch.chdir(short)
    for n in (1, 2):
        layers = {
            f"transformer_encoder_layer_{i}": {
                "self_attention_projection": {"kernel_matrix": np.full((64, 64), n / 7)}
            }
            for i in range(2)
        }
        flaxckpt.save(str(n), layers)
    flaxckpt.save("3", {"embedding_table": np.ones(3)})
    for args, code in (
        (["show", "1"], 0),
        (["diff", "1", "2"], 1),
        (["plan", "1", "3"], 1),
        (["du", "1"], 0),
    ):
        words = {
            piece
            for line in terminal(300, *args, code=code)
            for word in line.split()
            for piece in re.findall("[^/_]*[/_]|[^/_]+", word)
        }
        lines = terminal(width, *args, code=code)
        for line in lines:
            assert len(line) <= width or "flaxckpt plan" in line
            if "flaxckpt" not in line and str(short) not in line:
                pieces = re.findall("[^/_ :]*[/_]|[^/_ :]+", line)
                assert {*pieces} <= {word.strip(":") for word in words}, line
    shutil.rmtree(short)


def test_wrapped_paths_keep_their_indent(terminal, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    flaxckpt.save("1", {"encoder_layers": {"self_attention_of_queries_and": {"w": 1}}})
    lines = terminal(38, "show", "1")
    at = next(n for n, line in enumerate(lines) if "self_attention_" in line)
    assert lines[at].startswith("    self_attention_")
    assert re.match("    \\S", lines[at + 1])
