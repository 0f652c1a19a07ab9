"""The views show all that a checkpoint has, of any kind of state, and nothing else."""

import html
import json
import re
import shlex
import shutil
import subprocess
import sys
from math import inf, nan
from typing import NamedTuple
from urllib import parse

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.core import FrozenDict
from flax.training import train_state

import flaxckpt
from flaxckpt import errors
from flaxckpt._inspect import run_view
from flaxckpt._steps import markers
from tests.helpers import chunks, old_stores, seams
from tests.helpers.files import flip_bit, largest_file
from tests.helpers.report_runs import charts_of, damage, make_run
from tests.helpers.ui_server import serving

pytest.importorskip("starlette", reason="starlette is missing")
pytest.importorskip("uvicorn", reason="uvicorn is missing")

from flaxckpt._report.ui import app, compare, feeds, leaves, places, runs, workspace


class Pair(NamedTuple):
    left: object
    right: object


@flax.struct.dataclass
class Data:
    table: object
    name: str = flax.struct.field(pytree_node=False, default="x")


def x64_state():
    with jax.enable_x64(True):
        return {"big": jnp.arange(5, dtype=jnp.float64) / 3}


STATES = {
    "dict": lambda: {"a": {"b": np.arange(4.0), "c/d": np.ones(2)}, "": np.zeros(1)},
    "empty keys": lambda: {"": {"": np.ones(1), "a": 1}, "b": {"": np.ones(2), "c": 2}},
    "frozen": lambda: FrozenDict({"params": {"w": jnp.ones((2, 3))}}),
    "named tuple": lambda: Pair(np.arange(3), (1, 2.5, None, "text")),
    "dataclass": lambda: Data(jnp.zeros(3, jnp.bfloat16)),
    "nnx": lambda: nnx.Linear(3, 2, rngs=nnx.Rngs(0)),
    "optimizer": lambda: optax.adam(1e-3).init({"w": jnp.ones(3)}),
    "x64": x64_state,
    "leaf": lambda: np.arange(7),
    "keys": lambda: {"key": jax.random.key(0), "empty": np.zeros((0, 3))},
    "odd": lambda: {"x": np.array([np.nan, np.inf, 1.0]), "c": np.array([1j, 2])},
    "names": lambda: {"&x=1": np.ones(2), "é%#?+ \n": np.ones(2)},
}


@pytest.fixture
def open_page():
    """A function that opens a path as the server does."""
    opened_spaces = []

    def open_path(root, others=()):
        opened_spaces.append(workspace.open_workspace(places.find_places(root, others)))
        return opened_spaces[-1]

    yield open_path
    for each in opened_spaces:
        each.close()


def ask(address, space, **fields):
    """Returns the markup of an address with its fields, or the news of it."""
    views = {**app._VIEWS, **app._READS, "/news": runs.news}
    return views[address](space, workspace.Query(encode(fields)))


def encode(fields):
    given = {name.rstrip("_"): value for name, value in fields.items()}
    return parse.urlencode(given, errors="surrogatepass").encode()


def addresses(markup, path):
    """Returns the fields of all addresses of a path in the markup."""
    found = re.findall(rf'hx-get="{path}\?([^"]*)"', markup)
    return [workspace.Query(html.unescape(each).encode()) for each in found]


def leaves_in_the_tree(space, name):
    """Walks the tree as a reader who unfolds everything."""
    waiting = [ask("/leaves/branch", space, run=name)]
    found = []
    while waiting:
        markup = waiting.pop()
        found += [each.text("leaf") for each in addresses(markup, "/leaves/leaf")]
        for each in addresses(markup, "/leaves/branch"):
            fields = {"run": name, "under": each.text("under")}
            if (start := each.number("from")) is not None:
                fields["from"] = start
            waiting.append(ask("/leaves/branch", space, **fields))
    return found


@pytest.mark.parametrize("kind", STATES)
def test_tree_lists_every_leaf_with_statistics(tmp_path, open_page, kind):
    flaxckpt.save(tmp_path / "one", STATES[kind]())
    space = open_page(tmp_path / "one")
    stored = flaxckpt.metadata(tmp_path / "one").leaves
    assert sorted(leaves_in_the_tree(space, "one")) == sorted(stored)
    for path, info in stored.items():
        shown = ask("/leaves/leaf", space, run="one", leaf=path)
        assert html.escape(errors.printable(str(info))) in shown
    assert "<h2" in ask("/leaves", space, run="one")
    assert "Sizes" in ask("/run", space, run="one")


def test_tree_opens_around_leaf_of_url(tmp_path, open_page):
    layers = {f"layer_{n}": {"w": np.ones(1), "b": np.ones(1)} for n in range(30)}
    flaxckpt.save(tmp_path / "one", {"params": layers})
    space = open_page(tmp_path / "one")
    for asked, shown in (({}, set()), ({"leaf": "params/layer_7/w"}, {"w", "b"})):
        markup = ask("/leaves/branch", space, run="one", **asked)
        links = re.findall('<a [^>]*?(aria-current)?(?:="true")?>(.*?)</a>', markup)
        assert {name for _, name in links} == shown
        assert [name for current, name in links if current] == ["w"] * bool(asked)


@pytest.mark.parametrize(
    ("a", "b", "loss", "said"),
    [
        ([1, 1.1, 1.2], [1, 1.1, 1.9], [1, 1, 1], "b changed most at the last save."),
        ([1, 1.1, 1.2], [1, 3, 3], [1, 1, nan], "b jumped first, at step 2."),
        (
            [1, 1, nan],
            [1, 2, inf],
            [1, 1, nan],
            "a became non-finite at step 3, as did 1 other leaf. Step 2 is shown, the"
            " last finite one.",
        ),
        (
            [1, nan, nan],
            [1, 9, nan],
            [1, 1, 1],
            "a became non-finite at step 2, before the others. Step 1 is shown, the"
            " last finite one.",
        ),
        (
            [1, 1, nan],
            [1, 9, nan],
            [1, 1, nan],
            "b jumped at step 2, and became non-finite at step 3. Step 2 is shown, the"
            " last finite one.",
        ),
    ],
)
def test_leaves_open_on_the_one_to_look_at_first(tmp_path, open_page, a, b, loss, said):
    with flaxckpt.Checkpointer(tmp_path / "run") as run:
        on_step = flaxckpt.CheckpointCallback(
            run, every_steps=1, statistics=True, check_step=False
        )
        for step in range(3):
            state = {"a": np.full(4, 1.0 * a[step]), "b": np.full(4, 1.0 * b[step])}
            on_step(step + 1, state, metrics={"loss": loss[step]})
    shown = ask("/leaves", open_page(tmp_path / "run"), run="run")
    [note, *_] = re.findall('<p class="note">(.*?)</p>', shown)
    assert note == said
    step = int((re.findall(r"Step (\d) is shown", said) or [3])[0])
    assert f'hx-get="/leaves/leaf?run=run&amp;step={step}&amp;leaf={said[0]}"' in shown


def test_loads_wide_container_in_parts(tmp_path, open_page):
    state = {f"layer_{n}": np.full(1, n) for n in range(1201)}
    flaxckpt.save(tmp_path / "one", state)
    space = open_page(tmp_path / "one")
    found = leaves_in_the_tree(space, "one")
    assert len(found) == len(set(found)) == 1201


def test_finds_leaves_by_all_words_in_any_case():
    paths = ["params/Dense_0/kernel", "params/Dense_1/bias", "mu/Dense_1/kernel"]
    assert leaves.find(paths, ["kernel", "dense_1"]) == ["mu/Dense_1/kernel"]
    assert leaves.find(paths, ["nothing"]) == []
    assert leaves.find(paths, []) == paths


def test_shows_statistics_of_values(tmp_path, open_page):
    values = np.array([0.0, 1.0, np.nan, -3.0, np.inf])
    flaxckpt.save(tmp_path / "one", {"w": values})
    shown = ask("/leaves/leaf", open_page(tmp_path / "one"), run="one", leaf="w")
    pairs = dict(re.findall("<dt>([^<]*)</dt><dd>([^<]*)</dd>", shown))
    assert (pairs["min"], pairs["max"], pairs["elements"]) == ("-3", "1", "5")
    assert (pairs["zeros"], pairs["NaNs"], pairs["infinities"]) == ("1", "1", "1")
    counts = [int(n) for n in re.findall('data-count="([0-9]+)"', shown)]
    assert sum(counts) == 3


def test_large_reads_wait_for_click(tmp_path, open_page, monkeypatch):
    with flaxckpt.Checkpointer(tmp_path / "run") as run:
        for step in (1, 2):
            run.save(step, {"w": np.full(100, step)})
    space = open_page(tmp_path / "run")
    seams.replace(monkeypatch, "ui_leaves.most_bytes", 99)
    seams.replace(monkeypatch, "ui_compare.most_bytes", 99)
    for view, fields in (
        ("/leaves/leaf", {"leaf": "w"}),
        ("/compare/result", {"a": 1, "b": 2}),
    ):
        shown = ask(view, space, run="run", **fields)
        assert "Read them" in shown
        assert "<table" not in shown
        assert "<dl" not in shown
        shown = ask(view, space, run="run", large=1, **fields)
        assert "Read them" not in shown


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    root = tmp_path_factory.mktemp("ui")
    make_run(root)
    return root


def test_comparison_matches_diff(made, open_page):
    space = open_page(made)
    shown = ask("/compare/result", space, run="run", a=70, b=80)
    truth = flaxckpt.diff(made / "run", made / "run", step_a=70, step_b=80)
    assert set(re.findall('data-path="([^"]*)"', shown)) == set(truth.changed)
    shown = ask("/compare/result", space, run="run", a=80, with_="source")
    assert "step 80 of run to source" in shown


def test_comparison_counts_other_shapes_and_names_damaged_items(tmp_path, open_page):
    with flaxckpt.Checkpointer(tmp_path / "run", items=("params", "opt")) as run:
        for step in (1, 2, 3):
            params = {"w": np.full(3, step), "x": np.ones(step), "y": np.ones(2)}
            new = {"z": np.ones(2)} if step == 2 else {}
            run.save(step, {"params": params | new, "opt": {"m": np.ones(2)}})
    space = open_page(tmp_path / "run")
    shown = html.unescape(ask("/compare/result", space, run="run", a=1, b=2))
    assert (
        "1 leaf changed and 2 did not. 1 leaf has another shape or dtype. 1 leaf is in"
        " only one of them." in shown
    )
    group = "1 of 4 leaves changed, 1 has another shape or dtype, 1 is in only one"
    assert group in shown
    shutil.rmtree(tmp_path / "run" / "3" / "params")
    shown = html.unescape(ask("/compare/result", space, run="run", a=1, b=3))
    assert "0 leaves changed and 1 did not. 1 item could not be compared." in shown
    assert 'data-unreadable="params"' in shown
    assert "in step 3: it " in shown


def test_comparison_shows_metrics_despite_damaged_leaves(made, tmp_path, open_page):
    shutil.copytree(made / "run", tmp_path / "run")
    chunks.flip(tmp_path / "run/70/state", "params.trunk.kernel/c.0.0")
    space = open_page(tmp_path / "run")
    shown = html.unescape(ask("/compare/result", space, run="run", a=70, b=80))
    truth = flaxckpt.diff(tmp_path / "run", tmp_path / "run", step_a=70, step_b=80)
    [(leaf, why)] = truth.unreadable.items()
    assert leaf == "params/trunk/kernel"
    assert f'data-unreadable="{leaf}"' in shown
    assert why in shown
    assert ">Not compared<" in shown
    assert "1 leaf cannot be read, and may differ" in shown
    [counts] = re.findall('<strong>params<.*?facts">([^;<]*)', shown)
    assert counts == "1 of 3 leaves changed, 1 cannot be read"
    changed = re.findall('data-path="([^"]*)"', shown)
    assert set(changed) == set(truth.changed)
    rows = re.findall('<tr data-compared="([^"]*)">(.*?)</tr>', shown)
    values = {name: re.findall("<td.*?>([^<]*)</td>", row) for name, row in rows}
    assert values == {
        "eval/loss": ["0.55", "0.52", "-0.03"],
        "eval/accuracy": ["0.725", "0.74", "+0.015"],
    }
    assert 'role="alert"' not in shown


def chosen(shown, field):
    """Returns the values of a list that a page has chosen."""
    [inside] = re.findall(rf'<select name="{field}".*?</select>', shown)
    return re.findall(r'value="([^"]*)" selected', inside)


@pytest.fixture
def damaged(made, tmp_path):
    """A directory of two equal runs; step 70 of `run` is damaged, 30 was deleted."""
    shutil.copytree(made / "run", tmp_path / "all/run")
    shutil.copytree(made / "run", tmp_path / "all/other")
    chunks.flip(tmp_path / "all/run/70/state", "params.trunk.kernel/c.0.0")
    return tmp_path / "all"


@pytest.mark.slow
@pytest.mark.parametrize("known_by", ["nobody", "mark", "verify"])
@pytest.mark.parametrize("run", ["run", "other"])
def test_compares_selected_damaged_step(damaged, open_page, known_by, run):
    if known_by == "mark":
        arguments = ["verify", damaged / "run", "70", "--mark"]
        subprocess.run([sys.executable, "-m", "flaxckpt", *arguments], check=False)
    space = open_page(damaged)
    if known_by == "verify":
        ask("/verify/start", space, run="run", step=70)
        space.verifications.job._thread.join()
    asked = {"run": run, "a": 60, "with": "run", "b": 70, "go": 1}
    shown = ask("/compare", space, **asked)
    assert chosen(shown, "a") == ["60"]
    assert chosen(shown, "b") == ["70"]
    [url] = addresses(shown, "/compare/result")
    assert (url.number("a"), url.number("b")) == (60, 70)
    result = compare.result(space, url)
    assert "step 70" in result
    assert "step 80" not in result
    assert "1 leaf cannot be read, and may differ" in result


@pytest.mark.parametrize("step", [30, 33])
@pytest.mark.parametrize(
    ("view", "field", "then"),
    [
        ("/compare", "a", "/compare/result"),
        ("/compare", "b", "/compare/result"),
        ("/leaves", "step", "/leaves/branch"),
        ("/plan", "step", "/plan/result"),
        ("/verify", "step", "/verify/start"),
    ],
)
def test_missing_step_stays_selected_and_raises_error(
    damaged, open_page, step, view, field, then
):
    space = open_page(damaged)
    asked = {"run": "run", "with": "run", "into": "other", "go": 1, "a": 60} | {
        field: step
    }
    shown = ask(view, space, **asked)
    assert chosen(shown, field) == [str(step)]
    why = "deleted" if step == 30 else "not in this run"
    assert f">{step}, {why}</option>" in shown
    queries = addresses(shown, then)
    assert queries or then == "/verify/start"
    assert all(query.number(field) == step for query in queries)
    with pytest.raises(errors.CheckpointNotFoundError, match=f"no step {step}"):
        ask(then, space, **asked)


def test_rejects_step_of_single_checkpoint(made, open_page):
    space = open_page(made)
    asked = {"run": "run", "a": 60, "with": "source", "b": 70, "go": 1}
    [url] = addresses(ask("/compare", space, **asked), "/compare/result")
    with pytest.raises(errors.CheckpointError, match="is a single checkpoint"):
        compare.result(space, url)


def test_single_step_is_not_compared_with_itself(tmp_path, open_page):
    with flaxckpt.Checkpointer(tmp_path / "run") as run:
        run.save(1, {"w": np.ones(2)})
    space = open_page(tmp_path / "run")
    shown = ask("/compare", space, run="run")
    assert "no other step" in shown
    assert addresses(shown, "/compare/result") == []


def test_comparison_names_changes_that_are_not_finite(tmp_path, open_page):
    with flaxckpt.Checkpointer(tmp_path / "run") as run:
        run.save(1, {"w": np.ones(2), "x": np.ones(2)})
        run.save(2, {"w": np.full(2, np.nan), "x": np.full(2, 1.5)})
    shown = ask("/compare/result", open_page(tmp_path / "run"), run="run", a=1, b=2)
    rows = dict(re.findall('<tr data-path="(.)"(.*?)</tr>', shown))
    assert rows["w"].count(">not finite<") == 2
    assert "0.5" in rows["x"]
    assert "inf<" not in shown


def test_comparison_sums_layers_and_draws_changes_by_logarithm(tmp_path, open_page):
    changes = {"a/w": 0.01, "a/v": 0.01, "b/w": 10.0, "b/v": 0.0, "c/w": 1e-5}
    with flaxckpt.Checkpointer(tmp_path / "run") as run:
        for step in (0, 1):
            layers = {"a": {}, "b": {}, "c": {}, "d": np.ones(4) * (1 + step / 10**3.5)}
            for path, change in changes.items():
                layers[path[0]][path[2]] = np.ones(4) * (1 + step * change)
            run.save(step, {"params": layers})
    shown = ask("/compare/result", open_page(tmp_path / "run"), run="run", a=0, b=1)
    rows = re.findall('<tr data-layer="params/(.)" data-rel="(.*?)">(.*?)</tr>', shown)
    assert [(name, round(float(rel), 6)) for name, rel, _ in rows] == [
        ("b", 10.0),
        ("a", 0.01),
        ("d", 0.000316),
        ("c", 1e-5),
    ]
    widths = [float(re.findall('width="([0-9.]+)%"', row)[0]) for *_, row in rows]
    assert widths == [100.0, 50.0, 25.0, 0.0]
    counts = [re.findall("<td[^>]*>([^<]*)</td>", row)[-1] for *_, row in rows]
    assert counts == ["1", "2", "1", "1"], "of the leaves that changed"


def test_compares_first_step_with_next_by_default(made, open_page):
    space = open_page(made)
    shown = ask("/compare", space, run="run", b=20)
    assert (chosen(shown, "a"), chosen(shown, "b")) == (["40"], ["20"])


def test_shows_no_difference_of_metrics_missing_on_one_side(tmp_path, open_page):
    with flaxckpt.Checkpointer(tmp_path / "run") as run:
        run.save(1, {"w": np.ones(2)}, metrics={"loss": 0.5, "odd": np.nan})
        run.save(2, {"w": np.ones(2)}, metrics={"odd": 1.0, "new": 2.0})
    space = open_page(tmp_path / "run")
    shown = ask("/compare/result", space, run="run", a=1, b=2)
    rows = re.findall('<tr data-compared="([^"]*)">(.*?)</tr>', shown)
    values = {name: re.findall("<td.*?>(.*?)</td>", row) for name, row in rows}
    lost = '<span class="lost">'  # red
    assert values == {
        "loss": ["0.5", "none", ""],
        "odd": [f"{lost}NaN</span>", "1", f"{lost}NaN</span>"],
        "new": ["none", "2", ""],
    }
    assert "nothing changed in 1 leaf." in shown


def test_compares_run_with_neighbors_and_command_line_runs(tmp_path, open_page):
    for name in ("runs/a", "runs/b", "elsewhere/c"):
        with flaxckpt.Checkpointer(tmp_path / name) as run:
            for step in (1, 2):
                run.save(step, {"w": np.full(3, step + len(name))})
    flaxckpt.save(tmp_path / "outside", {"w": np.ones(3)})
    (tmp_path / "runs" / "link").symlink_to(tmp_path / "outside")
    (tmp_path / "runs" / "wanted.json").write_text('{"w": "float32[3]"}')
    further = str(tmp_path / "elsewhere" / "c")
    space = open_page(tmp_path / "runs" / "a", [further])
    shown = ask("/compare", space, run="a", with_="b", b=2)
    assert options(shown, "with") == ["a", "b", further]
    assert options(shown, "b") == ["2", "1"]
    assert f"{tmp_path / 'runs' / 'a'} --against {further} --against PATH" in (
        html.unescape(ask("/compare", space, run="a"))
    )
    for name in ("b", further):
        shown = ask("/compare/result", space, run="a", a=1, with_=name, b=2)
        assert f"step 1 of a to step 2 of {name}" in shown
    for name in ("link", "../outside", str(tmp_path / "outside"), "wanted.json", ".."):
        for view in ("/compare", "/compare/result"):
            with pytest.raises(errors.CheckpointNotFoundError, match="may open"):
                ask(view, space, run="a", with_=name)
    for view in ("/leaves", "/run", "/compare"):
        with pytest.raises(errors.CheckpointNotFoundError, match="may open"):
            ask(view, space, run="b")


def test_plan_reports_success_or_conflicts_of_restore(made, open_page):
    space = open_page(made / "run", [made / "source"])
    into = str(made / "source")
    assert into in ask("/plan", space, run="run")
    shown = ask("/plan/result", space, run="run", step=80, into=into)
    assert "would fail: 3 leaves" in shown
    assert shown.count('data-actions="conflict"') == 3
    [advice] = re.findall('<p class="advice">In Python: (.*?)</p>', shown)
    assert advice.strip()
    shown = ask("/plan/result", space, run="run", step=80, into="run")
    assert "would succeed" in shown


def test_plan_page_tells_how_to_add_state(made, open_page):
    space = open_page(made / "run")
    shown = html.unescape(ask("/plan", space, run="run"))
    assert f"flaxckpt ui {made / 'run'} --against PATH" in shown
    assert f"> {made / 'wanted.json'}" in shown
    space = open_page(made / "run", [made / "source"])
    shown = html.unescape(ask("/plan", space, run="run"))
    assert f"--against {made / 'source'} --against PATH" in shown


def options(markup, name):
    """Returns the values of a list to choose from."""
    [found] = re.findall(
        f'<select name="{name}"[^>]*>(.*?)</select>', markup, re.DOTALL
    )
    return [html.unescape(each) for each in re.findall('value="([^"]*)"', found)]


def test_plans_into_states_created_later(tmp_path, open_page):
    runs_dir = tmp_path / "runs"
    with flaxckpt.Checkpointer(runs_dir / "a") as run:
        run.save(1, {"w": np.ones(2, np.float32)})
    space = open_page(runs_dir / "a")
    assert options(ask("/plan", space, run="a"), "into") == ["a"]
    flaxckpt.save(runs_dir / "single", {"w": np.ones(3, np.float32)})
    (runs_dir / "wanted.json").write_text('{"w": "float32[2]"}')
    (runs_dir / "config.json").write_text('{"lr": 0.1}')
    (runs_dir / "empty.json").write_text("{}")
    (runs_dir / "notes").mkdir()
    flaxckpt.save(tmp_path / "outside", {"w": np.ones(2)})
    (tmp_path / "outside.json").write_text('{"w": "float32[2]"}')
    (runs_dir / "link").symlink_to(tmp_path / "outside")
    (runs_dir / "link.json").symlink_to(tmp_path / "outside.json")
    shown = ask("/plan", space, run="a")
    assert options(shown, "into") == ["a", "single", "wanted.json"]
    good = ask("/plan/result", space, run="a", into="wanted.json")
    assert "would succeed" in good
    assert "would fail" in ask("/plan/result", space, run="a", into="single")
    hidden = ["link", "link.json", "../outside.json", str(tmp_path / "outside.json")]
    for name in (*hidden, "notes", "config.json", "empty.json", ".."):
        for view in ("/plan", "/plan/result", "/plan/suggest"):
            with pytest.raises(errors.CheckpointNotFoundError, match="may open"):
                ask(view, space, run="a", into=name)
    for view in ("/leaves", "/run", "/compare"):
        with pytest.raises(errors.CheckpointNotFoundError, match="may open"):
            ask(view, space, run="single")
    (runs_dir / "wanted.json").unlink()
    assert options(ask("/plan", space, run="a"), "into") == ["a", "single"]


def test_lists_state_files_beside_runs_and_of_command_line(tmp_path, open_page):
    for name in ("a", "deep/b"):
        with flaxckpt.Checkpointer(tmp_path / "runs" / name) as run:
            run.save(1, {"w": np.ones(2, np.float32)})
    for file in ("runs/one.json", "runs/deep/two.json", "runs/a/no.json", "three.json"):
        (tmp_path / file).write_text('{"w": "float32[2]"}')
    three = str(tmp_path / "three.json")
    space = open_page(tmp_path / "runs", [three])
    into = options(ask("/plan", space, run="a"), "into")
    assert into == ["a", "deep/b", "one.json", "deep/two.json", three]
    assert "would succeed" in ask("/plan/result", space, run="a", into=three)
    assert options(ask("/compare", space, run="a"), "with") == ["a", "deep/b"]
    (tmp_path / "bad.json").write_text('{"w": 1}')
    with pytest.raises(errors.OptionError, match="must be a string such as"):
        places.find_places(tmp_path / "runs", [tmp_path / "bad.json"])


def test_plan_and_step_lists_show_damage(made, tmp_path, open_page):
    shutil.copytree(made / "run", tmp_path / "run")
    largest = tmp_path / "run/80/state/d/0.small.0"
    largest.write_bytes(largest.read_bytes()[:-1])
    first = min(int(step.name) for step in (tmp_path / "run").glob("[0-9]*"))
    space = open_page(tmp_path / "run")
    for view in ("/plan", "/leaves", "/compare"):
        shown = ask(view, space, run="run")
        assert "80, damaged" in shown
        assert 'value="80" selected' not in shown, "a damaged step is not proposed"
    shown = ask("/plan/result", space, run="run", step=80, into="run")
    assert "would fail: the checkpoint is damaged" in shown
    assert largest.name in shown
    assert "would succeed" not in shown
    assert "no array was read" in ask(
        "/plan/result", space, run="run", step=first, into="run"
    )
    flip_bit(largest_file(tmp_path / "run" / str(first) / "state"))
    [place] = space.places.runs.values()
    report = space.feeds.latest(place).report
    space.verifications.start(place, [s for s in report.steps if s.step in (first, 70)])
    space.verifications.job._thread.join()
    shown = ask("/plan/result", space, run="run", step=first, into="run")
    assert "would fail: the checkpoint is damaged" in shown
    assert f"{first}, damaged" in ask("/plan", space, run="run").replace(
        ", best, ", ", "
    )
    shown = ask("/plan/result", space, run="run", step=70, into="run")
    assert "every byte was verified" in shown


@pytest.mark.parametrize("known_by", ["mark", "sizes", "description", "verify"])
def test_plan_of_damaged_step_links_to_newest_good_step(
    made, tmp_path, open_page, known_by
):
    shutil.copytree(made / "run", tmp_path / "run")
    shutil.copytree(made / "run", tmp_path / "other")
    file = tmp_path / "run/80/state/d/0.small.0"
    match known_by:
        case "mark":
            markers.mark_damaged(tmp_path / "run/80", "it is lost")
        case "sizes":
            file.write_bytes(file.read_bytes()[:-1])
        case "description":
            (tmp_path / "run/80/flaxckpt.json").write_text("{")
        case "verify":
            chunks.flip(tmp_path / "run/80/state", "params.trunk.kernel/c.0.0")
    space = open_page(tmp_path)
    if known_by == "verify":
        ask("/verify/start", space, run="run", step=80)
        space.verifications.job._thread.join()
    asked = {"run": "run", "into": "other", "source": "new", "drop": "params/head"}
    asked |= {"missing": "init", "optimizer": "reinit"}
    shown = html.unescape(ask("/plan/result", space, **asked, step=80))
    assert "would fail: the checkpoint is damaged" in shown
    [url] = re.findall('href="/plan[?]([^"]*)">Plan step 70 instead</a>', shown)
    assert "Plan step 70 instead</a>, the newest that is not known to be dam" in shown
    link = dict(parse.parse_qsl(url))
    assert link == {**asked, "step": "70"}
    shown = ask("/plan/result", space, **link)
    assert "would succeed" in shown
    assert "instead" not in shown


@pytest.mark.slow
def test_plan_reads_state_of_run_from_newest_readable_step(made, tmp_path, open_page):
    shutil.copytree(made / "run", tmp_path / "run")
    (tmp_path / "run/80/flaxckpt.json").write_text("{")
    space = open_page(tmp_path / "run")
    asked = {"run": "run", "into": "run"}
    shown = html.unescape(ask("/plan/result", space, **asked, step=80))
    assert 'step=70&into=run">Plan step 70 instead</a>' in shown
    shown = html.unescape(ask("/plan/result", space, **asked, step=70))
    assert "would succeed" in shown
    assert "The state is that of step 70 of run: a newer step is damaged." in shown
    _, command = re.findall('(?s)<pre class="command">(.*?)</pre>', shown)
    verb = [sys.executable, "-m", *shlex.split(command)]
    assert verb[-4:] == ["--target-step", "70", "--step", "70"]
    assert subprocess.run(verb, capture_output=True, check=False).returncode == 0
    for step in (tmp_path / "run").glob("[0-9]*"):
        (step / "flaxckpt.json").write_text("{")
    with pytest.raises(errors.DamagedCheckpointError):
        ask("/plan/result", open_page(tmp_path / "run"), **asked, step=70)


def test_plan_links_to_no_other_damaged_step(made, tmp_path, open_page):
    shutil.copytree(made / "run", tmp_path / "run")
    for file in (tmp_path / "run").glob("*/state/d/0.small.0"):
        file.write_bytes(file.read_bytes()[:-1])
    shown = ask("/plan/result", open_page(tmp_path), run="run", step=80, into="run")
    assert "would fail: the checkpoint is damaged" in shown
    assert "instead" not in shown


def test_failing_plan_shows_remedy_as_field_value(tmp_path, open_page):
    def save_as(path, name, **more):
        params = {name: {"up": jnp.ones((4, 6)), "down": jnp.ones((6, 4))}, **more}
        flaxckpt.save(tmp_path / path, {"params": params})

    save_as("old", "enc")
    save_as("new", "back")
    save_as("head", "back", head={"w": jnp.ones(9)})
    shapes = {"up": (4, 6), "down": (6, 4), "head": (9,)}
    apart = {name: {"w": jnp.ones(shape)} for name, shape in shapes.items()}
    flaxckpt.save(tmp_path / "apart", {"params": apart})
    space = open_page(tmp_path)
    rule = r"params/enc/(.*)=params/back/\1"
    asked = {"run": "old", "into": "new"}
    shown = html.unescape(ask("/plan/result", space, **asked))
    assert f"<pre>{rule}</pre>" in shown
    assert "Guess" not in shown
    asked["into"] = "apart"
    [url] = addresses(ask("/plan/result", space, **asked), "/plan/suggest")
    assert url.text("into") == "apart"
    shown = html.unescape(ask("/plan/suggest", space, **asked))
    assert "2 of 3 parameters have a source" in shown
    [link] = re.findall('href="/plan[?]([^"]*)"', shown)
    guessed = workspace.Query(link.encode()).text("rename")
    assert "params/enc/up=params/up/w" in guessed
    assert f"<pre>{guessed}</pre>" in shown
    asked["into"] = "head"
    shown = html.unescape(ask("/plan/result", space, **asked))
    assert f"<pre>{rule}</pre>" in shown
    assert "Guess" not in shown
    shown = ask("/plan/result", space, **asked, rename=rule)
    assert "would fail: 1 leaf of head" in shown
    assert "remedy" not in shown, "the reader has rules already"
    counts = re.findall("<strong>([^<]*)</strong>", shown)
    assert counts == ["1 missing", "2 loaded, renamed"]
    assert "as they are stored, under another path in the checkpoint" in shown


def test_lineage_links_to_run_of_its_source(tmp_path, open_page):
    started = {"w": jnp.ones(2)}
    with flaxckpt.Checkpointer(tmp_path / "first") as run:
        run.save(5, started)
    with flaxckpt.Checkpointer(tmp_path / "second") as run:
        on_step = flaxckpt.CheckpointCallback(run)
        on_step.restore_or_init(started, source=tmp_path / "first")
        run.save(1, started)
    away = shutil.move(tmp_path / "first", tmp_path.with_name("away"))
    space = open_page(tmp_path)
    link = '<strong><a href="/run?run=first">first</a></strong>'
    assert link not in ask("/run/sections", space, run="second")
    shutil.move(away, tmp_path / "first")
    look_again(space)
    assert link in ask("/run/sections", space, run="second")


def test_directory_shows_metrics_and_row_of_each_run(made, open_page):
    space = open_page(made)
    assert set(space.places.runs) == {"run", "source"}
    shown = all_runs(space)
    assert set(re.findall('data-run="([^"]*)"', shown)) == {"run", "source"}
    drawn = charts_of(shown)["runs"]["metrics"]
    assert [metric["name"] for metric in drawn] == ["eval/loss", "eval/accuracy"]
    assert [line["name"] for line in drawn[0]["lines"]] == ["run"]


def test_shows_damaged_run_with_its_damage(made, tmp_path, open_page):
    shutil.copytree(made / "run", tmp_path / "run")
    (tmp_path / "run" / "80" / "flaxckpt.json").write_text("{")
    largest = largest_file(tmp_path / "run" / "70" / "state")
    largest.write_bytes(largest.read_bytes()[:-1])
    space = open_page(tmp_path / "run")
    assert "damaged" in ask("/run", space, run="run")
    assert "damaged" in ask("/", space)
    assert "Leaves" in ask("/leaves", space, run="run")


def test_table_of_runs_shows_newest_good_step(made, tmp_path, open_page):
    shutil.copytree(made / "run", tmp_path / "runs" / "run")
    shutil.copytree(made / "run", tmp_path / "runs" / "lost")
    for step in (40, 70, 80):
        flip_bit(largest_file(tmp_path / "runs" / "run" / str(step) / "state"))
    run = flaxckpt.Checkpointer(tmp_path / "runs" / "run")
    assert not any(run.verify(step).ok for step in (40, 70, 80))
    lost = [n for n in (tmp_path / "runs" / "lost").iterdir() if n.name.isdigit()]
    for step in lost:
        (step / "flaxckpt.json").write_text("{")
    space = open_page(tmp_path / "runs")
    shown = all_runs(space)
    row, without = cells(shown)
    last = "last 0.5 at step 60"
    lines = charts_of(shown)["runs"]["metrics"][0]["lines"]
    [loss] = [line for line in lines if line["name"] == "run"]
    [first, *_] = charts_of(ask("/run", space, run="run"))["metrics"]
    for line in (loss, first):
        assert line["facts"].startswith(f"best 0.3 at step 50, {last}, ")
    assert (row["newest"], row["best eval/loss"]) == ("60", "0.3, step 50")
    assert (row["last eval/loss"], row["last eval/accuracy"]) == ("0.5", "0.75")
    assert row["state"] == "3 damaged steps: 80, 70, 40"
    assert without["newest"] == ""
    assert without["state"] == f"{len(lost)} damaged steps: no step can be used"


def test_table_of_runs_shows_verification_results(made, tmp_path, open_page):
    shutil.copytree(made / "run", tmp_path / "runs" / "run")
    space = open_page(tmp_path / "runs")
    [row] = cells(all_runs(space))
    assert row["newest"] == "80"
    flip_bit(largest_file(tmp_path / "runs" / "run" / "80" / "state"))
    [place] = space.places.runs.values()
    steps = space.feeds.latest(place).report.steps
    space.verifications.start(place, steps[-1:])
    space.verifications.job._thread.join()
    [row] = cells(all_runs(space))
    assert (row["newest"], row["best eval/loss"]) == ("70", "0.3, step 50")
    assert row["last eval/loss"] == "0.55"
    assert row["state"] == "1 damaged step: 80"


def test_single_checkpoint_shows_its_metrics(tmp_path, open_page):
    with flaxckpt.Checkpointer(tmp_path / "run") as run:
        run.save(3, {"w": np.ones(4)}, metrics={"loss": 0.25, "accuracy": np.nan})
    (tmp_path / "some").mkdir()
    shutil.copytree(tmp_path / "run" / "3", tmp_path / "some" / "solo")
    flaxckpt.save(tmp_path / "some" / "without", {"w": np.ones(4)})
    space = open_page(tmp_path / "some" / "solo")
    shown = ask("/run", space, run="solo")
    assert "2 metrics are stored with the checkpoint." in shown
    assert rows_of(shown, "metric") == [["loss", "0.25"], ["accuracy", "NaN"]]
    space = open_page(tmp_path / "some")
    shown = ask("/run", space, run="without")
    assert "No metrics are stored with the checkpoint." in shown
    lasts = [(r["last loss"], r["last accuracy"]) for r in cells(all_runs(space))]
    assert lasts == [("0.25", "NaN"), ("", "")]


def rows_of(markup, what):
    rows = re.findall(rf"<tr data-{what}=.*?</tr>", markup)
    return [
        [re.sub("<.*?>", "", c) for c in re.findall("<t[hd].*?</t[hd]>", r)]
        for r in rows
    ]


def test_table_of_runs_shows_best_of_each_policy(tmp_path, open_page):
    names = ("loss", "accuracy", "error", "perplexity", "bleu")
    rows = {1: (0.5, 0.3, 9.0, 7.0, 3.0), 2: (0.2, 0.2, 5.0, 6.0, 4.0)}
    for run, count in (("a", 2), ("b", 5), ("none", 0)):
        best = [
            flaxckpt.policies.BestN(1, name, "max" if name == "accuracy" else "min")
            for name in names[:count]
        ]
        keep = [flaxckpt.policies.LatestN(9), *best]
        with flaxckpt.Checkpointer(tmp_path / run, keep=keep) as saved:
            for step, values in rows.items():
                metrics = dict(zip(names, values, strict=True))
                saved.save(step, {"w": np.arange(999.0) * step}, metrics=metrics)
    space = open_page(tmp_path)
    lines = ["0.2, step 2", "accuracy 0.3, step 1"]
    more = ["error 5, step 2", "perplexity 6, step 2", "and 1 more"]
    shown = all_runs(space)
    assert best_lines(shown) == {"a": lines, "b": lines + more, "none": lines[:1]}
    assert list(best_lines(shown)) == ["a", "b", "none"]
    assert "By the best loss, lowest first" in shown
    damage(tmp_path / "a" / "2")
    lines[0] = "0.5, step 1"
    shown = best_lines(all_runs(open_page(tmp_path)))
    assert shown["a"] == lines
    assert list(shown) == ["b", "none", "a"], "the run with the best value first"
    damage(tmp_path / "a" / "1")
    assert best_lines(all_runs(open_page(tmp_path)))["a"] == []


def best_lines(shown):
    """Returns run -> the lines on its best steps, in the order of the table."""
    rows = re.findall('<tr[^>]* data-run="([^"]*)"(.*?)</tr>', shown)
    return {run: re.findall("<div>(.*?)</div>", row) for run, row in rows}


def cells(shown):
    """Returns the texts of each row of a table, by the titles of the columns."""
    [head] = re.findall("<thead>.*?</thead>", shown)
    rows = [head, *re.findall("<tr[^>]* data-run.*?</tr>", shown)]
    titles, *texts = (
        [re.sub("<[^>]*>", "", cell) for cell in re.findall("<t[hd][ >].*?</t[hd]>", r)]
        for r in rows
    )
    return [dict(zip(titles, row, strict=True)) for row in texts]


def test_shows_empty_run(tmp_path, open_page):
    (tmp_path / "run").mkdir()
    space = open_page(tmp_path / "run")
    assert "no steps yet" in ask("/run", space, run="run")
    for view in ("/leaves", "/compare", "/plan"):
        assert "<form" in ask(view, space, run="run") or view == "/leaves"


def test_finds_runs_in_directories_without_following_links(tmp_path):
    state = {"w": np.ones(2)}
    for name in ("a", "deep/b", "deep/er/c", "deep/er/est/d"):
        with flaxckpt.Checkpointer(tmp_path / "runs" / name) as run:
            run.save(1, state)
    flaxckpt.save(tmp_path / "runs" / "deep" / "single", state)
    flaxckpt.save(tmp_path / "outside", state)
    (tmp_path / "runs" / "link").symlink_to(tmp_path / "outside")
    (tmp_path / "runs" / "notes.txt").write_text("x")
    found = places.find_places(tmp_path / "runs")
    assert list(found.runs) == ["a", "deep/b", "deep/er/c", "deep/single"]
    for name in ("link", "..", "a/1", "", "/", str(tmp_path / "outside")):
        with pytest.raises(errors.CheckpointNotFoundError, match="may open"):
            found.find(name)


def test_find_places_rejects_paths_without_checkpoints(tmp_path):
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(errors.CheckpointFormatError):
        places.find_places(tmp_path)
    with pytest.raises(errors.CheckpointNotFoundError):
        places.find_places(tmp_path / "missing")
    flaxckpt.save(tmp_path / "one", {"w": np.ones(2)})
    with pytest.raises(errors.CheckpointNotFoundError):
        places.find_places(tmp_path / "one", [tmp_path / "missing"])


def test_pages_change_no_files(made, open_page):
    before = {path: path.stat().st_mtime_ns for path in made.rglob("*")}
    space = open_page(made)
    all_runs(space)
    ask("/run", space, run="run")
    ask("/leaves/leaf", space, run="run", leaf="params/head")
    ask("/compare/result", space, run="run", a=70, b=80)
    ask("/plan/result", space, run="run", step=80, into="source")
    assert {path: path.stat().st_mtime_ns for path in made.rglob("*")} == before


def test_news_report_saved_and_deleted_steps(tmp_path, open_page):
    with flaxckpt.Checkpointer(tmp_path / "run") as run:
        run.save(1, {"w": np.ones(2)}).wait()
        space = open_page(tmp_path / "run")
        [place] = space.places.runs.values()
        first = space.feeds.latest(place)
        run.save(2, {"w": np.ones(2)}).wait()
        run.delete(1)
    feeds._Feed.refresh(space.feeds._feeds[place.path])
    second = space.feeds.latest(place)
    assert second.version > first.version
    assert [step.step for step in second.report.steps] == [2]
    assert feeds.changes(first.report, second.report) == "step 2 saved, step 1 deleted"
    assert space.feeds.news([place]).version == str(second.version)


def test_news_report_steps_marked_by_another_process(tmp_path, open_page):
    with flaxckpt.Checkpointer(tmp_path / "run") as run:
        for step in (1, 2):
            run.save(step, {"w": np.ones(2)}).wait()
    file = tmp_path / "run/1/state/d/0.small.0"
    whole = file.read_bytes()
    file.write_bytes(whole[::-1])
    space = open_page(tmp_path / "run")
    [place] = space.places.runs.values()
    space.feeds.latest(place)
    for content, news in ((whole[::-1], "damaged"), (whole, "good again")):
        file.write_bytes(content)
        run_view.update_marker(flaxckpt.verify(tmp_path / "run", step=1))
        feeds._Feed.refresh(space.feeds._feeds[place.path])
        assert space.feeds.latest(place).news == f"step 1 {news}"


def test_app_registers_addresses_of_views():
    assert set(app._VIEWS) | set(app._READS) >= {"/", "/run", "/leaves", "/compare"}
    assert "/plan/result" in app._VIEWS


@pytest.mark.parametrize("kind", ["memory", "moto"])
def test_shows_runs_in_object_stores(store_path, open_page, kind):
    root = store_path(kind)
    with flaxckpt.Checkpointer(root / "run") as run:
        for step in (1, 2):
            run.save(step, {"w": np.full(3, step)}, metrics={"loss": 1 / step})
    space = open_page(root)
    assert list(space.places.runs) == ["run"]
    [loss] = charts_of(ask("/run", space, run="run"))["metrics"]
    assert loss["name"] == "loss"
    assert "<dl" in ask("/leaves/leaf", space, run="run", step=2, leaf="w")
    assert 'data-path="w"' in ask("/compare/result", space, run="run", a=1, b=2)


def test_missing_package_prints_one_line_error(tmp_path):
    flaxckpt.save(tmp_path / "one", {"w": np.ones(2)})
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "import sys; sys.modules['uvicorn'] = None\n"
            "sys.argv = ['flaxckpt', 'ui', sys.argv[1]]\n"
            "import flaxckpt.cli; flaxckpt.cli.main()",
            tmp_path / "one",
        ],
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 2
    assert done.stderr == (
        "flaxckpt: flaxckpt ui needs uvicorn: pip install flaxckpt[ui]\n"
    )


@pytest.mark.slow
def test_json_option_prints_address(tmp_path):
    flaxckpt.save(tmp_path / "one", {"w": np.ones(2)})
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "flaxckpt", "ui", tmp_path / "one"),
            *("--no-browser", "--json"),
        ],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        document = json.loads("".join(process.stdout.readline() for _ in range(3)))
        assert document["address"].startswith("http://127.0.0.1:")
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.mark.slow
def test_port_in_use_prints_one_line_error(tmp_path):
    flaxckpt.save(tmp_path / "one", {"w": np.ones(2)})
    with serving(tmp_path / "one") as served:
        port = served.host.rpartition(":")[2]
        done = subprocess.run(
            [
                *(sys.executable, "-m", "flaxckpt", "ui", tmp_path / "one"),
                *("--no-browser", "--port", port),
            ],
            capture_output=True,
            text=True,
            check=False,
            timeout=600,
        )
    assert done.returncode == 2
    assert done.stderr.startswith(f"flaxckpt: port {port} of 127.0.0.1 cannot be used")
    assert done.stderr.count("\n") == 1


def all_runs(space):
    """Returns the view on all runs, after each was read."""
    for place in runs.listed(space):
        space.feeds.latest(place)
    return ask("/runs", space)


def test_verdict_on_several_runs_names_best_and_counts_lost_ones(tmp_path, open_page):
    for n in range(4):
        keep = [flaxckpt.policies.BestN(1, "loss", "min")]
        with flaxckpt.Checkpointer(tmp_path / f"r{n}", keep=keep) as run:
            for step in (10, 20):
                is_lost = n > 1 and step == 20
                loss = nan if is_lost else 1.0 / (step - n)
                run.save(step, {"w": np.ones(2)}, metrics={"loss": loss})
    space = open_page(tmp_path)
    shown = all_runs(space)
    assert "Best r0: 0.05 at step 20 (loss); 2 of 4 diverged." in shown
    # The names are alike, and the metrics: no group would say anything.
    assert options(shown, "group") == ["", "state"]
    for run in ("r0", "r1"):
        shutil.rmtree(tmp_path / run)
    look_again(space)
    shown = all_runs(space)
    assert "0.125 at step 10 (loss), though it diverged at 20; 2 of 2" in shown


def look_again(space):
    """Looks for new runs at once."""
    space.places._due = 0.0
    return ask("/news", space)


def test_run_started_later_appears(tmp_path, open_page):
    for name in ("a", "deep/b"):
        with flaxckpt.Checkpointer(tmp_path / name) as run:
            run.save(1, {"w": np.ones(2)})
    space = open_page(tmp_path)
    all_runs(space)
    before = look_again(space)
    assert look_again(space) == before
    (tmp_path / "notes").mkdir()
    with flaxckpt.Checkpointer(tmp_path / "deep" / "c") as run:
        run.save(1, {"w": np.ones(2)}, metrics={"loss": 1.0})
    after = look_again(space)
    assert after.version != before.version
    assert list(space.places.runs) == ["a", "deep/b", "deep/c"]
    shown = all_runs(space)
    after = look_again(space)
    assert 'data-run="deep/c"' in shown
    assert f'data-version="{after.version}"' in shown
    shutil.rmtree(tmp_path / "a")
    assert look_again(space).version not in (before.version, after.version)
    assert list(space.places.runs) == ["deep/b", "deep/c"]
    with pytest.raises(errors.CheckpointNotFoundError):
        ask("/news", space, run="a")


def test_empty_directory_becomes_directory_of_runs(tmp_path, open_page):
    space = open_page(tmp_path)
    assert space.places.is_single
    with flaxckpt.Checkpointer(tmp_path / "a") as run:
        run.save(1, {"w": np.ones(2)})
    look_again(space)
    assert not space.places.is_single
    assert list(space.places.runs) == ["a"]
    assert "All runs" in ask("/", space)


def test_does_not_read_known_runs_again(tmp_path, open_page, monkeypatch):
    with flaxckpt.Checkpointer(tmp_path / "a") as run:
        run.save(1, {"w": np.ones(2)})
    space = open_page(tmp_path)
    looked = []
    real = seams.current("run_search.is_run")
    seams.replace(
        monkeypatch, "run_search.is_run", lambda path: looked.append(path) or real(path)
    )
    look_again(space)
    assert looked == [tmp_path]


def follow(shown):
    """Returns the fields of the link that plans with the shown remedy."""
    [url] = re.findall('href="/plan[?]([^"]*)" class="button"', html.unescape(shown))
    query = workspace.Query(url.encode())
    names = ("run", "step", "into", "source", "optimizer", "missing", "drop", "rename")
    return {name: query.text(name) for name in names if query.text(name)}


def save_with_head(path, width, step=0):
    params = {"trunk": jnp.ones((4, 4)), "head": {"kernel": jnp.ones((4, width))}}
    tx = optax.adam(1e-3)
    state = train_state.TrainState.create(apply_fn=print, params=params, tx=tx)
    flaxckpt.save(path, state.replace(step=step))


def test_plan_into_wider_head_links_to_fresh_head(tmp_path, open_page):
    save_with_head(tmp_path / "old", 3)
    save_with_head(tmp_path / "wide", 5)
    space = open_page(tmp_path)
    asked = {"run": "old", "into": "wide"}
    shown = ask("/plan/result", space, **asked)
    assert "would fail: 3 leaves" in shown
    assert "<pre>params/head/.*</pre>" in shown
    fields = follow(shown)
    assert fields == {**asked, "drop": "params/head/.*", "missing": "init"}
    shown = ask("/plan/result", space, **fields)
    assert "would succeed" in shown
    assert "Not from the checkpoint: 3 leaves" in shown


@pytest.mark.slow
def test_plan_shows_complete_command_of_remedy(tmp_path, open_page):
    (tmp_path / "of mine").mkdir()
    with flaxckpt.Checkpointer(tmp_path / "of mine" / "old") as run:
        run.save(3, {"params": {"head": jnp.ones(3), "trunk": jnp.ones(2)}})
    wide = {"params": {"head": jnp.ones(5), "trunk": jnp.ones(2)}}
    flaxckpt.save(tmp_path / "of mine" / "wide", wide)
    space = open_page(tmp_path / "of mine")
    asked = {"run": "old", "into": "wide", "step": 3, "optimizer": "exact"}
    shown = html.unescape(ask("/plan/result", space, **asked))
    [command] = re.findall('<pre class="command">(.*)</pre>', shown)
    words = shlex.split(command)
    assert words[:4] == ["flaxckpt", "plan", *map(str, space_paths(space))]
    assert words[4:] == [
        *("--step", "3", "--optimizer", "exact"),
        *("--missing", "init", "--drop", "params/head"),
    ]
    verb = [sys.executable, "-m", "flaxckpt", *words[1:]]
    assert subprocess.run(verb, capture_output=True, check=False).returncode == 0
    shown = html.unescape(ask("/plan/result", space, **follow(shown)))
    call, same = re.findall('(?s)<pre class="command">(.*?)</pre>', shown)
    assert shlex.split(same) == words, "the plan that succeeds has its command, too"
    names = {"flaxckpt": flaxckpt, "state": wide}
    exec(call.replace("\nflaxckpt.load", "\nloaded = flaxckpt.load"), names)
    np.testing.assert_array_equal(names["loaded"]["params"]["head"], np.ones(5))


def space_paths(space):
    return [place.path for place in space.places.runs.values()]


def test_disables_choice_of_runs_without_steps(tmp_path, open_page):
    for name, steps in (("a", ()), ("b", (1,)), ("c", (1, 2))):
        with flaxckpt.Checkpointer(tmp_path / name) as run:
            for step in steps:
                run.save(step, {"w": np.ones(2)})
    (tmp_path / "a" / "events.jsonl").write_text("")
    space = open_page(tmp_path)
    for view, field in (("/compare", "with"), ("/plan", "into")):
        options = listed(ask(view, space, run="c"), field)
        assert options["a"] == ' disabled="">a (no steps)'
        assert options["b"].endswith(">b")
        assert "disabled" not in options["b"] + options["c"]
    chosen = listed(ask("/plan", space, run="b"), "into")["b"]
    assert chosen.startswith(' selected=""'), "a run is planned into its own state"
    with flaxckpt.Checkpointer(tmp_path / "a") as run:
        run.save(1, {"w": np.ones(2)})
    assert listed(ask("/compare", space, run="c"), "with")["a"] == ">a"


def listed(shown, field):
    """Returns value -> the attributes and the text of each entry of a list."""
    [entries] = re.findall(f'<select name="{field}".*?>(<option.*?)</select>', shown)
    return dict(re.findall('<option value="([^"]*)"([^<]*)</option>', entries))


def test_plan_into_another_run_links_to_plan_as_source(tmp_path, open_page):
    save_with_head(tmp_path / "old", 3)
    save_with_head(tmp_path / "wide", 5)
    with flaxckpt.Checkpointer(tmp_path / "run") as run:
        for step in (1, 2):
            run.save(step, flaxckpt.load(tmp_path / "old"))
    space = open_page(tmp_path)
    shown = html.unescape(ask("/plan/result", space, run="old", into="wide"))
    [url] = re.findall('href="/plan[?]([^"]*)">plan it as the source', shown)
    query = workspace.Query(url.encode())
    assert [query.text(name) for name in ("run", "into", "source")] == [
        *("old", "wide", "new")
    ]
    dropped = ask("/plan/result", space, run="old", into="wide", drop="params/head/.*")
    [url] = re.findall('href="/plan[?]([^"]*)">plan it as', html.unescape(dropped))
    query = workspace.Query(url.encode())
    assert query.text("missing") == "init"
    names = ("run", "into", "source", "drop", "missing")
    fields = {name: query.text(name) for name in names}
    assert "The restore would succeed" in ask("/plan/result", space, **fields)
    for fields in (
        {"run": "old", "into": "wide", "source": "new"},
        {"run": "run", "into": "run", "step": 1},
    ):
        assert "as the source of" not in ask("/plan/result", space, **fields)


def test_plan_without_classes_links_to_matched_optimizer(tmp_path, open_page):
    save_with_head(tmp_path / "old", 3)
    count = {"opt_state": {"0": {"count": "int32[]"}, "extra": "float32[2]"}}
    (tmp_path / "wanted.json").write_text(json.dumps(count))
    space = open_page(tmp_path)
    asked = {"run": "old", "into": "wanted.json"}
    shown = ask("/plan/result", space, **asked)
    assert "The state names no classes" in shown
    assert follow(shown) == {**asked, "optimizer": "match"}
    assert "names no classes" not in ask("/plan/result", space, **follow(shown))


def test_plans_source_of_new_run(tmp_path, open_page):
    save_with_head(tmp_path / "old", 3, step=7)
    space = open_page(tmp_path)
    asked = {"run": "old", "into": "old"}
    assert "Begin anew" not in ask("/plan/result", space, **asked)
    shown = ask("/plan/result", space, **asked, source="new")
    assert "Begin anew, as in a new run: 6 leaves" in shown
    assert 'data-path="step" data-actions="init"' in shown
    continued = ask("/plan/result", space, **asked, source="new", optimizer="match")
    assert "Begin anew" not in continued
    shown = html.unescape(ask("/plan", space, **asked, source="new"))
    assert '<option value="new" selected="">' in shown
    [url] = re.findall('hx-get="/plan/result[?]([^"]*)"', shown)
    assert workspace.Query(url.encode()).text("source") == "new"
    (tmp_path / "wanted.json").write_text('{"opt_state": {"n": "int32[]"}}')
    with pytest.raises(errors.OptionError) as raised:
        ask("/plan/result", space, run="old", into="wanted.json", source="new")
    assert str(raised.value).startswith(
        "a new run begins its optimizer anew, but wanted.json names no classes, so that"
        " opt_state/n would be planned as any other leaf: take a run, a checkpoint"
    )
    assert not re.search("TARGET|PATH|as-source|pass ", str(raised.value))
    (tmp_path / "wanted.json").write_text('{"params": {"n": "int32[]"}}')
    shown = ask("/plan/result", space, run="old", into="wanted.json", source="new")
    assert "would fail: 1 leaf of wanted.json" in shown, "it has no optimizer"


def test_plan_names_damage_outside_restored_leaves(tmp_path, open_page):
    save_with_head(tmp_path / "old", 3)
    old_stores.make_directories(tmp_path / "old")
    [chunk] = (tmp_path / "old/state/opt_state.0.mu.trunk").glob("c*")
    chunk.write_bytes(chunk.read_bytes()[:-1])
    space = open_page(tmp_path)
    asked = {"run": "old", "into": "old"}
    shown = ask("/plan/result", space, **asked)
    assert "would fail: the checkpoint is damaged" in shown
    assert "instead" not in shown, "it is no step of a run"
    shown = ask("/plan/result", space, **asked, source="new")
    assert "would succeed" in shown
    assert "not where this restore reads: " in shown
    assert "opt_state.0.mu.trunk" in shown


def test_plan_applies_transforms_first(tmp_path, open_page):
    def save_as(name):
        params = {name: {"kernel": jnp.ones((4, 4)), "bias": jnp.ones(4)}}
        optimizer = optax.adam(1e-3).init(params)
        flaxckpt.save(tmp_path / name, {"params": params, "opt_state": optimizer})

    save_as("old")
    save_as("new")
    space = open_page(tmp_path)
    asked = {"run": "old", "into": "new"}
    assert "would fail" in ask("/plan/result", space, **asked)
    renamed = {"rename": "params/old/kernel=params/new/kernel\r\n"}
    assert "would fail" in ask("/plan/result", space, **asked, **renamed)
    rules = {"rename": r"params/old/(.*)=params/new/\1", "cast": ".*/kernel=bfloat16"}
    shown = html.unescape(ask("/plan/result", space, **asked, **rules))
    assert "would succeed" in shown
    assert "from params/old/kernel, by rename > cast" in shown
    assert "by rename" in shown
    fresh = ask("/plan/result", space, **asked, **rules, drop="opt_state/.*")
    assert "The optimizer initializes 5 leaves" in fresh
    afresh = ask("/plan/result", space, **asked, **rules, optimizer="reinit")
    assert "The optimizer initializes 5 leaves" in afresh
    shown = html.unescape(ask("/plan", space, **asked, **rules))
    assert rules["rename"] in shown
    [url] = re.findall('hx-get="/plan/result[?]([^"]*)"', shown)
    assert workspace.Query(url.encode()).text("rename") == rules["rename"]


def test_plan_accepts_missing_leaves_with_init(tmp_path, open_page):
    for name, head in (("old", "head"), ("new", "classifier")):
        params = {"trunk": jnp.ones(4), head: jnp.ones((4, 3))}
        flaxckpt.save(tmp_path / name, {"params": params})
    space = open_page(tmp_path)
    asked = {"run": "old", "into": "new"}
    assert "would fail" in ask("/plan/result", space, **asked)
    shown = ask("/plan/result", space, **asked, missing="init")
    assert "would succeed" in shown
    assert "Not from the checkpoint: 1 leaf. Pass a state with values" in shown
    shown = html.unescape(ask("/plan", space, **asked, missing="init"))
    [url] = re.findall('hx-get="/plan/result[?]([^"]*)"', shown)
    assert workspace.Query(url.encode()).text("missing") == "init"
    assert '<option value="init" selected="">' in shown


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"missing": "zeros"}, "missing must be init, found 'zeros'"),
        ({"rename": "params"}, "rename must be PATTERN=NAME"),
        ({"rename": "params/(=x"}, "not a regular expression|unterminated|missing"),
        ({"cast": ".*=float7"}, "float7"),
        ({"drop": "nothing/.*"}, "matches no leaf"),
        ({"source": "old"}, "source must be new, found 'old'"),
        ({"optimizer": "guess"}, "optimizer must be match, exact or reinit"),
    ],
)
def test_rejects_invalid_rules(tmp_path, open_page, fields, message):
    flaxckpt.save(tmp_path / "one", {"params": {"w": np.ones(2, np.float32)}})
    space = open_page(tmp_path / "one")
    with pytest.raises(errors.CheckpointError, match=message):
        ask("/plan/result", space, run="one", into="one", **fields)


def test_shows_long_rules_completely(tmp_path, open_page):
    flaxckpt.save(tmp_path / "one", {"w": np.ones(2)})
    rule = "\n".join(f"<b>/{n}=</textarea>{n}" for n in range(300))
    shown = ask(
        "/plan", open_page(tmp_path / "one"), run="one", into="one", rename=rule
    )
    [field] = re.findall('<textarea name="rename"[^>]*>\n(.*?)</textarea>', shown, re.S)
    assert html.unescape(field) == rule


def test_shows_runs_while_reading_them(made, open_page):
    space = open_page(made)
    first = ask("/runs", space)
    assert "Reading " in first or first.count("data-run=") >= 2
    last = all_runs(space)
    assert "Reading " not in last
    assert set(re.findall('tr data-run="([^"]*)"', last)) == {"run", "source"}
    series = re.findall('data-series="([^"]*)"', last)
    assert series == ["run"], "source has no metrics, so it has no line"
