"""The numbers of a report equal numbers of the run from other sources."""

import ast
import dataclasses
import json
import math
import re
import shlex
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import flaxckpt
from examples import report as examples_report
from flaxckpt import _report, errors
from flaxckpt._inspect import history, subtrees
from flaxckpt._inspect.history import SavedStep
from flaxckpt._report.data import MetricValue
from flaxckpt._state.leaf import LeafInfo
from flaxckpt._steps import event as steps_event
from flaxckpt._steps import markers as steps_markers
from flaxckpt._util import html as util_html
from flaxckpt.policies import BestN, LatestN
from tests.helpers import chunks, old_stores, seams
from tests.helpers.files import flip_bit, largest_file
from tests.helpers.report_runs import (
    KEEP,
    LASTS,
    LOSSES,
    Elements,
    charts_of,
    damage,
    make_run,
    state_at,
)


@pytest.fixture(scope="session")
def _made(tmp_path_factory):
    root = tmp_path_factory.mktemp("report")
    make_run(root)
    return root


@pytest.fixture
def run(_made, tmp_path):
    shutil.copytree(_made, tmp_path, dirs_exist_ok=True)
    return tmp_path / "run"


def gather(path, **options):
    return _report.gather(path, _report.ReportOptions(**options))


def journal(run):
    return [
        json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()
    ]


# ---- gathered data ------------------------------------------------------------------


def test_steps_and_reasons_match_run(run):
    found = gather(run, keep=KEEP)
    with flaxckpt.Checkpointer(run, keep=KEEP, read_only=True) as opened:
        assert {s.step: list(s.why) for s in found.steps} == opened.explain()
    assert {step.step for step in found.steps} == LASTS
    assert found.policies == tuple(map(str, KEEP))


def test_shows_saved_metrics_and_marks_best(run):
    found = gather(run, keep=KEEP).metrics["eval/loss"]
    assert {m.step: m.value for m in found} == LOSSES
    assert {m.step for m in found if m.is_deleted} == LOSSES.keys() - LASTS
    assert {m.step: m.mode for m in found if m.mode} == {50: "min"}
    assert {m.step for m in found if m.is_ranked} == {50, 20}
    assert {m.step for m in found if m.stays} == LASTS


@pytest.mark.parametrize("name", ["flaxckpt.json", "state/_METADATA"])
def test_step_without_description_is_damaged(run, name):
    (run / "80" / name).unlink()
    found = gather(run)
    assert {i.step: i.state for i in found.integrity}[80] == "damaged"
    assert found.faults
    assert "flaxckpt.json" in found.integrity[-1].detail


def test_policy_metric_comes_first(tmp_path):
    with flaxckpt.Checkpointer(tmp_path / "run") as saved:
        metrics = {f"m{n}": 1.0 for n in range(20)} | {"loss": 0.5}
        saved.save(1, {"w": np.ones(2)}, metrics=metrics)
    found = gather(tmp_path / "run", keep=[BestN(1, "loss", "min")])
    assert list(found.metrics) == ["loss", *metrics][:-1]
    with flaxckpt.Checkpointer(
        tmp_path / "run", keep=[BestN(1, "loss", "min")], read_only=True
    ) as opened:
        assert re.findall(r">(loss|m\d+)<", opened._repr_html_()) == [
            "loss",
            "m0",
            "m1",
        ]
    drawn = charts_of(_report.page(found))["metrics"]
    assert [metric["name"] for metric in drawn][:2] == ["loss", "m0"]


def test_shows_tags_of_run(tmp_path):
    tags = {"lr": 0.1, "fast": True, "name": "<b>", "long": "x" * 99, "tree": {"a": 1}}
    with flaxckpt.Checkpointer(tmp_path / "run", metadata=tags) as ckpt:
        ckpt.save(1, {"w": jnp.ones(2)})
    found = gather(tmp_path / "run")
    assert [*found.tags] == ["lr", "fast", "name", "long"]
    assert "lr=0.1, fast=true, name=&lt;b&gt;, long=xx" in _report.page(found)
    assert "x" * 60 not in _report.page(found)


def test_report_marks_only_kept_steps_as_staying(run):
    found = gather(run, keep=[LatestN(1)])
    stays = {m.step: m.stays for m in found.metrics["eval/loss"]}
    assert stays == {step: step == 80 for step in LOSSES}


def test_uses_policies_recorded_by_run(run):
    found = gather(run)
    assert found.policies == tuple(map(str, KEEP))
    assert [point.step for _, point in found.bests] == [50]
    reasons = {step.step: step.reason for step in found.history if not step.exists}
    assert reasons == dict.fromkeys(LOSSES.keys() - LASTS, "no policy keeps it")
    kept = {verdict.policy: verdict.kept for verdict in found.verdicts[30]}
    assert kept == {
        str(KEEP[0]): (40, 50, 60),
        str(KEEP[1]): (20, 50),
        str(KEEP[2]): (40,),
    }
    text = _text(_report.page(found))
    assert "LatestN(3) kept 40, 50, 60" in text
    best = "BestN(2, 'eval/loss', 'min') kept 20 (0.4), 50 (0.3); step 30 had 0.7"
    assert best in text


def test_calls_nothing_best_without_policies(run):
    lines = (run / "events.jsonl").read_text().splitlines()
    unknown = [line for line in lines if '"kind": "configured"' not in line]
    (run / "events.jsonl").write_text("\n".join(unknown) + "\n")
    found = gather(run)
    assert found.policies is None
    assert "The policies of the run are unknown" in _text(_report.page(found))
    values = found.metrics["eval/loss"]
    assert not any(m.mode or m.is_ranked for m in values)


def test_policy_of_metric_without_finite_value_is_known(tmp_path):
    keep = [flaxckpt.policies.BestN(1, "loss", "min")]
    with flaxckpt.Checkpointer(tmp_path / "run", keep=keep) as saved:
        saved.save(1, {"w": np.ones(2)}, metrics={"loss": float("nan")})
    text = _text(_report.page(gather(tmp_path / "run")))
    assert "Never finite: loss." in text
    assert "Only a policy defines" not in text


def test_seconds_of_saves_match_journal(run):
    committed = {e["step"]: e for e in journal(run) if e["kind"] == "committed"}
    saves = gather(run).saves
    assert [save.step for save in saves] == list(LOSSES)
    for save in saves:
        event = committed[save.step]
        assert save.outcome == "durable"
        assert save.blocked_secs == event["details"]["blocked_secs"]
        assert save.total_secs == event["details"]["total_secs"]
        assert save.began == pytest.approx(event["time"] - save.total_secs)


def test_report_lists_deletions_and_restores(run):
    found = gather(run)
    deleted = {e.step for e in found.happened if e.kind == "deleted"}
    assert deleted == LOSSES.keys() - LASTS
    assert [e.step for e in found.happened if e.kind == "restored"][-1] == 80


def test_a_step_says_how_many_other_processes_have_a_copy(tmp_path):
    with flaxckpt.Checkpointer(tmp_path / "run") as saved:
        for step in (1, 2):
            saved.save(step, {"w": np.zeros(3)}).wait()
    with (tmp_path / "run/events.jsonl").open("a", encoding="utf-8") as journal:
        copied = {"kind": "copied", "step": 2, "path": "", "time": 1e9}
        print(json.dumps({**copied, "details": {"copies": 2}}), file=journal)
    page = _report.page(gather(tmp_path / "run"))
    assert "2 copies at other processes</span>" in page  # of the newest step
    rows = re.findall('<tr id="step-([0-9]+)".*?<td class="n">([0-9]*)</td></tr>', page)
    assert rows == [("2", "2"), ("1", "")]


def test_sizes_add_up(run):
    found = gather(run)
    described = flaxckpt.metadata(run)
    parts = (*found.parts, *found.copies)
    assert sum(part.bytes for part in parts) == described.total_bytes
    values = [info for info in described.leaves.values() if info.kind != "empty"]
    assert sum(part.leaves for part in parts) == found.leaves == len(values)
    assert found.total_bytes == described.total_bytes


def test_changes_match_diff_with_largest_first(run):
    report = gather(run)
    truth = flaxckpt.diff(run, run, step_a=70, step_b=80)
    assert report.compared == (70, 80)
    assert report.change == truth
    rows = Elements(_report.page(report)).with_data("data-path", "data-rel")
    found = {row["data-path"]: float(row["data-rel"]) for row in rows}
    assert found == {path: leaf.rel_norm for path, leaf in truth.changed.items()}
    for group in ("params", "opt_state/0/trace"):
        norms = [norm for path, norm in found.items() if path.startswith(f"{group}/")]
        assert norms == sorted(norms, reverse=True)
    head = truth.changed["params/head"]
    assert found["params/head"] == pytest.approx(10 / 70)
    assert (head.different, head.elements) == (48, 48)


def test_shows_changes_despite_damaged_leaf(run):
    chunks.flip(run / "70/state", "params.trunk.kernel/c.0.0")
    report = gather(run, step_a=70)
    truth = flaxckpt.diff(run, run, step_a=70, step_b=80)
    assert list(report.change.unreadable) == ["params/trunk/kernel"]
    assert list(report.change.changed) == list(truth.changed)
    assert report.change.metrics["eval/loss"] == (0.55, 0.52)
    page = _report.page(report)
    section = page[page.index('id="change"') :]
    assert "1 leaf cannot be read, and may differ" in section
    assert 'data-unreadable="params/trunk/kernel"' in section
    assert 'data-compared="eval/loss"' in section
    assert ">1 of 3 leaves changed, 1 cannot be read; relative" in section


def test_counts_part_with_only_damaged_leaves(tmp_path):
    with flaxckpt.Checkpointer(tmp_path / "run") as saved:
        for step in (1, 2):
            saved.save(step, {"a": {"w": np.full(3, step)}, "b": np.full(3, step)})
    chunks.flip(tmp_path / "run/2/state", "a.w/c.0")
    page = _report.page(gather(tmp_path / "run"))
    shown = [text for _, _, text in Elements(page).found]
    assert "0 of 1 leaf changed, 1 cannot be read" in shown
    assert "1 of 1 leaf changed; relative change 100\xa0%" in shown


def test_counts_changed_elements_among_all(tmp_path):
    with flaxckpt.Checkpointer(tmp_path / "run") as saved:
        for step in (1, 2):
            w = np.arange(16.0)
            w[: 11 * (step - 1)] += 1
            state = {"w": w, "name": f"s{step}", "key": jax.random.key(step)}
            saved.save(step, state)
    found = gather(tmp_path / "run")
    changed = found.change.changed.items()
    counts = {path: (leaf.different, leaf.elements) for path, leaf in changed}
    assert counts == {"w": (11, 16), "name": (1, 1), "key": (1, 2)}
    text = _text(_report.page(found))
    assert "11 of 16" in text
    assert "relative change" in text
    assert "largest difference" in text


def test_compares_chosen_steps(run):
    assert gather(run, step_a=20).compared == (20, 80)
    assert gather(run, step_b=50).compared == (40, 50)
    assert gather(run, step_a=50, step_b=20).compared == (50, 20)
    with pytest.raises(errors.OptionError, match="with itself"):
        gather(run, step_a=20, step_b=20)
    with pytest.raises(errors.CheckpointNotFoundError, match="no step 33"):
        gather(run, step_a=33)
    with pytest.raises(errors.OptionError, match="--no-diff"):
        gather(run, step_a=20, diff=False)


def test_compares_large_steps_only_on_request(run, monkeypatch):
    seams.replace(monkeypatch, "gathering.compared_bytes", 100)
    found = gather(run)
    assert found.change is None
    assert "--diff" in found.notes["change"]
    assert gather(run, diff=True).change is not None
    assert gather(run, step_a=20).change is not None
    assert gather(run, diff=False).change is None


def test_dataset_positions_match_saved_ones(run):
    found = gather(run).positions
    assert [(p.step, dict(p.values)) for p in found] == [
        (step, {"next_index": step}) for step in sorted(LASTS)
    ]
    assert {p.type.rpartition(".")[2] for p in found} == {"StepIndexed"}
    assert {p.processes for p in found} == {1}


def test_report_shows_the_recorded_lineage(run):
    found = gather(run).lineage
    assert found == flaxckpt.metadata(run).lineage
    assert found[0].path == str(_original(run) / "source")
    outcome = gather(run).source_outcome
    assert outcome == "9 initialized, 2 loaded, 1 dropped"  # the head
    assert outcome in _text(_report.page(gather(run)))


def _original(run):
    """Returns the directory where the run was created, as the steps record."""
    [origin] = flaxckpt.metadata(run).lineage
    return Path(origin.path).parent


def test_report_changes_nothing(run):
    def content():
        return {
            file: (file.stat().st_mtime_ns, file.stat().st_size)
            for file in run.rglob("*")
        }

    before = content()
    _report.page(gather(run, keep=KEEP, verify=True))
    assert content() == before


# ---- integrity ----------------------------------------------------------------------


def test_checks_files_and_sizes_by_default(run):
    found = gather(run)
    assert not found.faults
    assert {each.state for each in found.integrity} == {"whole"}
    damage(run / "50")
    found = gather(run)
    assert found.faults
    assert [e.step for e in found.integrity if e.state == "damaged"] == [50]


@pytest.mark.parametrize("is_old", [False, True], ids=["database", "directories"])
def test_report_names_the_damaged_files(tmp_path, is_old):
    state = {name: np.zeros((400, 400)) for name in ("b", "v", "w")}
    layout = flaxckpt.ArrayLayout(chunk_bytes=2**19)
    flaxckpt.save(tmp_path / "one", state, layout=layout)
    if is_old:
        old_stores.make_directories(tmp_path / "one")
        shown, files = "state/w/", (tmp_path / "one/state/w").glob("c.*")
    else:
        shown, files = "state/d/0.0/", (tmp_path / "one/state/d/0.0").iterdir()
    lost = sorted(files)
    assert len(lost) == (4 if is_old else 3)
    for file in lost[:2]:
        file.unlink()
    found = gather(tmp_path / "one")
    [check] = found.integrity
    assert check.state == "damaged"
    names = [f"{shown}{file.name}: wanted" for file in lost[:2]]
    assert re.search(
        "incomplete; restore another step: {}.*found none; {}.*found none$".format(
            *map(re.escape, names)
        ),
        check.detail,
    )
    assert check.detail in _text(_report.page(found))


def test_shows_complete_verify_command(run):
    assert f"flaxckpt verify {run} --all reads every byte" in _text(
        _report.page(gather(run))
    )
    text = _text(_report.page(gather(run / "80")))
    assert f"flaxckpt verify {run / '80'} reads every byte" in text
    spaced = run.rename(run.with_name("a run"))
    text = _text(_report.page(gather(spaced)))
    assert f"flaxckpt verify '{spaced}' --all reads every byte" in text
    assert "No array was read" not in _text(_report.page(gather(spaced, verify=True)))


def _card(page, name="integrity"):
    """Returns the class and the texts of a card."""
    elements = Elements(page).found
    at = next(
        n for n, (_, given, _) in enumerate(elements) if given.get("data-card") == name
    )
    return elements[at][1]["class"], [text for _, _, text in elements[at + 1 : at + 4]]


def test_best_card_names_compared_steps(run):
    texts = ["Best eval/loss", "0.3", "lowest, at step 50, of 8 saved"]
    assert _card(_report.page(gather(run)), "best") == ("card main best", texts)
    keep = [BestN(1, "eval/accuracy", "max")]
    texts = ["Best eval/accuracy", "0.85", "highest, at step 50, of 8 saved"]
    assert _card(_report.page(gather(run, keep=keep)), "best")[1] == texts
    keep = [BestN(1, "eval/loss", "max")]  # the highest were deleted
    gone = "step 10 with 0.9 was better, but is gone"
    texts = ["Best eval/loss", "0.6", f"highest, at step 40, of 6 that exist; {gone}"]
    assert _card(_report.page(gather(run, keep=keep)), "best")[1] == texts


def test_steps_card_counts_damaged_steps_separately(run):
    (_, texts) = _card(_report.page(gather(run)), "steps")
    assert texts == ["Steps", "6", "of 8 saved"]
    damage(run / "50")
    (_, texts) = _card(_report.page(gather(run)), "steps")
    assert texts == ["Steps", "6", "1 damaged, of 8 saved"]


def test_last_value_card_differs_from_best_card(tmp_path):
    with flaxckpt.Checkpointer(tmp_path / "run") as opened:
        opened.save(1, {"w": np.ones(2)}, metrics={"loss": 0.5})
    page = _report.page(gather(tmp_path / "run"))
    texts = ["Last loss", "0.5", "at step 1"]
    assert _card(page, "last-metric") == ("card main", texts)


def _captions(report):
    """Returns the facts beside the name of each curve."""
    return [metric["facts"] for metric in charts_of(_report.page(report))["metrics"]]


def test_last_value_is_of_newest_good_step(run):
    damage(run / "80")
    [loss, accuracy] = _captions(gather(run))
    assert loss.startswith("best 0.3 at step 50, last 0.55 at step 70, ")
    assert loss.endswith(", step 80 damaged or not readable")
    assert accuracy.startswith("last 0.725 at step 70, ")
    page = _report.page(gather(run, keep=[]))
    texts = ["Last eval/loss", "0.55", "at step 70"]
    assert _card(page, "last-metric") == ("card main", texts)


def test_last_value_of_damaged_steps_is_newest_and_marked(tmp_path):
    with flaxckpt.Checkpointer(tmp_path / "run") as opened:
        for step in (1, 2):
            state = {"w": np.arange(999.0) * step}
            opened.save(step, state, metrics={"loss": 1 / step})
    for step in (1, 2):
        damage(tmp_path / "run" / str(step))
    found = gather(tmp_path / "run")
    assert _captions(found)[0].startswith("last 0.5 at step 2 (cannot be used), ")
    texts = ["Last loss", "0.5", "at step 2, which is damaged"]
    assert _card(_report.page(found), "last-metric")[1] == texts


def test_last_value_may_be_non_finite(tmp_path):
    with flaxckpt.Checkpointer(tmp_path / "run") as opened:
        for step, loss in ((1, 0.5), (2, np.nan)):
            opened.save(step, {"w": np.ones(2)}, metrics={"loss": loss})
    assert _captions(gather(tmp_path / "run")) == ["last NaN at step 2"]


def test_best_card_names_better_damaged_step(run):
    damage(run / "50")
    kind, texts = _card(_report.page(gather(run)), "best")
    assert kind == "card main best"
    clause = "step 50 with 0.3 would be better, but is damaged"
    counted = "; policies count it until flaxckpt verify --mark marks it"
    wanted = ["0.4", f"lowest, at step 20; {clause}{counted}"]
    assert texts == ["Best eval/loss", *wanted]
    damage(run / "20")
    _, texts = _card(_report.page(gather(run)), "best")
    assert texts[2].endswith(f"; {clause}{counted}")
    steps_markers.mark_damaged(run / "50", "lost")
    kind, texts = _card(_report.page(gather(run)), "best")
    assert kind == "card main best"
    assert texts[2].endswith(f"; {clause}")


def test_best_card_reports_damaged_best_step(run):
    found = gather(run)
    lost = [each._replace(state="damaged") for each in found.integrity]

    def card_with(*damaged):
        checks = [
            bad if bad.step in damaged or not damaged else good
            for bad, good in zip(lost, found.integrity, strict=True)
        ]
        return _report.page(found.with_integrity(checks))

    kind, texts = _card(card_with(50), "best")
    assert kind == "card main best"
    assert texts[1:] == [
        "0.4",
        "lowest, at step 20; step 50 with 0.3 would be better, but is damaged; policies"
        " count it until flaxckpt verify --mark marks it",
    ]
    page = card_with()  # all
    _, texts = _card(page, "best")
    assert texts[2] == "lowest, at step 50, which is damaged; no good step has a value"
    kind, texts = _card(page, "newest")
    assert kind == "card bad"
    assert re.search('data-card="newest".*</time>, damaged<', page)


def test_best_step_has_row_among_thousands(run):
    found = gather(run)
    steps = [*found.history, *(SavedStep(n) for n in range(1000, 3000))]
    many = dataclasses.replace(found, history=tuple(steps))
    rows = Elements(_report.page(many)).with_data("data-step", "id")
    assert "step-50" in {row["id"] for row in rows}
    assert len(rows) == len({row["id"] for row in rows}) == 100


def ranked_run(path, *policies):
    rows = {1: (0.5, 0.3, 9.0, 7.0), 2: (0.2, 0.2, 5.0, 6.0), 3: (0.4, 0.9, 8.0, 8.0)}
    keep = [flaxckpt.policies.LatestN(9), *policies]
    with flaxckpt.Checkpointer(path, keep=keep) as run:
        for step, values in rows.items():
            names = ("loss", "accuracy", "perplexity", "error")
            metrics = dict(zip(names, values, strict=True))
            run.save(step, {"w": np.ones(2)}, metrics=metrics)
    return _report.page(gather(path))


def test_distinguishes_best_steps_of_several_metrics(tmp_path):
    best = flaxckpt.policies.BestN
    page = ranked_run(
        tmp_path / "run",
        *(best(1, "loss", "min"), best(1, "accuracy", "max")),
        *(best(1, "perplexity", "min"), best(1, "error", "min")),
    )
    assert re.findall('class="mark ([^"]*)">([^<]*)<', page) == [
        ("latest", "latest"),
        ("best", "best accuracy"),
        ("best", "best loss"),
        ("best", "best perplexity"),
        ("best", "best error"),
    ]
    cards = [
        c for c in Elements(page).with_data("data-card") if c["data-card"] == "best"
    ]
    assert [(c["data-step"], c["data-value"]) for c in cards] == [
        ("2", "0.2"),
        ("3", "0.9"),
        ("2", "5.0"),
    ]
    assert re.findall("Best [a-z]+", page) == [
        "Best loss",
        "Best accuracy",
        "Best perplexity",
    ]


def test_best_mark_of_one_metric_has_no_name(tmp_path):
    best = flaxckpt.policies.BestN(1, "loss", "min")
    page = ranked_run(tmp_path / "run", best)
    marks = re.findall('class="mark ([^"]*)">([^<]*)<', page)
    assert marks == [("latest", "latest"), ("best", "best")]
    assert page.count('data-card="best"') == 1


def test_does_not_show_unchecked_steps_as_good(tmp_path):
    with flaxckpt.Checkpointer(tmp_path) as ckpt:
        for step in range(14):
            ckpt.save(step, {"w": np.full(3, step)})
    damage(tmp_path / "1")  # not checked by default
    found = gather(tmp_path)
    assert not found.faults
    assert (len(found.integrity) - found.states["unknown"], len(found.integrity)) == (
        10,
        14,
    )
    page = _report.page(found)
    kind, texts = _card(page)
    assert "good" not in kind
    assert texts[1:] == ["10 of 14", "looked at"]
    assert 'title="10 with all files and sizes, 4 not looked at"' in page
    assert "10 of 14 steps looked at." in _text(page)
    assert "no damage" not in _text(page)
    kind, texts = _card(_report.page(gather(tmp_path, verify=True)))
    assert "bad" in kind
    assert texts[1] == "1 damaged"


def test_does_not_show_unread_arrays_as_good(run):
    kind, texts = _card(_report.page(gather(run)))
    assert "good" not in kind
    assert texts[1:] == ["complete", "all files, arrays not read"]


def test_full_check_finds_changed_byte(run):
    flip_bit(largest_file(run / "20" / "state"))
    found = {e.step: e for e in gather(run, verify=True).integrity}
    assert found[20].state == "damaged"
    assert {found[step].state for step in LASTS - {20}} == {"verified"}
    report = flaxckpt.verify(run, step=80)
    assert found[80].bytes_checked == report.bytes_checked


def test_reports_a_run_with_a_damaged_newest_step(run):
    (run / "80" / "flaxckpt.json").write_text("{")
    found = gather(run, keep=KEEP)
    assert found.faults
    assert found.steps[-1].step == 80
    page = _report.page(found)
    assert "damaged" in page


# ---- other checkpoints --------------------------------------------------------------


def test_reports_missing_journal(run):
    (run / "events.jsonl").unlink()
    found = gather(run)
    assert found.saves == ()
    assert "events.jsonl" in found.notes["saves"]
    assert found.notes["saves"] in _text(_report.page(found))


def test_report_of_one_checkpoint_omits_the_parts_of_runs(run):
    found = gather(run / "80")
    assert not found.is_run
    [card] = [
        card
        for card in Elements(_report.page(found)).with_data("data-card")
        if card["data-card"] == "newest"
    ]
    assert card["data-value"] == str(found.total_bytes)
    assert found.total_bytes == flaxckpt.metadata(run / "80").total_bytes
    assert found.change is None
    page = _report.page(found)
    assert 'id="steps"' not in page
    assert 'id="sizes"' in page
    with pytest.raises(errors.OptionError, match="without steps"):
        gather(run / "80", step_a=20)


def test_empty_run_renders_page(tmp_path):
    flaxckpt.Checkpointer(tmp_path / "new").close()
    found = gather(tmp_path / "new")
    assert found.steps == ()
    assert not found.faults
    assert "There are no steps yet." in _text(_report.page(found))


def test_reports_runs_in_stores(tmp_path):
    url = "memory://report/run"
    with flaxckpt.Checkpointer(url) as opened:
        for step in (1, 2):
            opened.save(step, {"w": np.full(4, step, np.float32)}, metrics={"l": step})
    found = gather(url)
    assert found.bytes is None
    assert not found.faults
    assert [save.step for save in found.saves] == [1, 2]
    assert [*found.change.changed] == ["w"]
    assert "memory://report/run" in _report.page(found)


# ---- saves from events --------------------------------------------------------------


def event(kind, step=1, time=100.0, **details):
    return steps_event.Event(kind, step, "", time, details)


def test_distinguishes_unsuccessful_saves():
    found = history.saves(
        [
            event("started", 1, 10.0),
            event("snapshot", 1, 11.0, blocked_secs=1.0),
            event("failed", 1, 12.0, error="no space"),
            event("started", 2, 20.0),
            event("snapshot", 2, 21.0, blocked_secs=1.0),
            event("started", 2, 30.0),  # after a crash
            event("snapshot", 2, 30.5, blocked_secs=0.5),
            event("committed", 2, 32.0, total_secs=2.0, blocked_secs=0.5, bytes=7),
            event("failed", 2, 33.0, what="copies", error="process 1: no space"),
            event("copied", 2, 35.0, copies=2, bytes=7, secs=1.0),
            event("failed", 2, 36.0, what="upload", error="out of reach"),
            event("uploaded", 2, 40.0, secs=3.0, bytes=7),
            event("failed", 3, 50.0, error="cannot begin"),
            event("started", 4, 60.0),
            event("snapshot", 4, 61.0, blocked_secs=1.0),
            event("cancelled", 4, 62.0),
        ]
    )
    assert [(s.step, s.outcome) for s in found] == [
        (1, "failed"),
        (2, "unfinished"),
        (2, "durable"),
        (3, "failed"),
        (4, "cancelled"),
    ]
    failed = [s.failure is not None for s in found]
    assert failed == [True, True, False, True, False]
    assert found[0].error == "no space"
    assert (found[2].began, found[2].total_secs) == (30, 2.0)
    assert [save.copies for save in found] == [0, 0, 2, 0, 0]
    assert found[3].blocked_secs is None


def test_report_omits_invalid_values_of_the_journal():
    found = history.saves(
        [event("committed", total_secs="soon"), event("copied", copies=[])]
    )
    assert found[0].copies == 0
    assert found[0].total_secs is None
    assert found[0].outcome == "durable"


# ---- drawing ------------------------------------------------------------------------


names = st.text(max_size=12)
trees = st.recursive(
    st.integers(0, 1000),
    lambda inner: st.dictionaries(st.text("abc", min_size=1, max_size=3), inner),
    max_leaves=80,
)


@given(
    st.dictionaries(
        st.lists(st.text("abcd", min_size=1, max_size=2), min_size=1, max_size=5).map(
            "/".join
        ),
        st.integers(0, 100),
        max_size=60,
    )
)
def test_parts_add_up_for_any_tree(sizes):
    # No path may be a leaf and a container.
    leaves = {
        path: _info(path, size)
        for path, size in sizes.items()
        if not any(other.startswith(f"{path}/") for other in sizes)
    }
    found = _report.parts.divide(subtrees.subtrees(leaves))
    assert sum(p.leaves for p in found) == len(leaves)
    assert sum(p.bytes for p in found) == sum(
        math.prod(info.shape) for info in leaves.values()
    )
    assert len(found) <= 80


def _info(path, size):
    return LeafInfo(path, tuple(path.split("/")), "array", "x", (size,), "int8")


@given(st.lists(st.floats(), min_size=1, max_size=9), st.booleans())
@example([-1.634266486238469e308] * 2, True)
def test_curves_of_any_numbers_are_json_and_keep_extremes(values, is_long):
    values = values * (500 if is_long else 1)
    series = [MetricValue(10**9 + n, value, True) for n, value in enumerate(values)]
    drawn = _report.chart_data.curve("m", series)
    assert json.loads(json.dumps(drawn, allow_nan=False)) == drawn
    assert len(drawn["x"]) == len(drawn["y"]) == len(drawn["state"]) <= 1201
    assert drawn["x"] == sorted(set(drawn["x"]))
    assert drawn["x"][-1] == series[-1].step
    finite = [float(f"{value:.6g}") for value in values if math.isfinite(value)]
    shown = [value for value in drawn["y"] if value is not None]
    assert {min(shown, default=0), max(shown, default=0)} == {
        min(finite, default=0),
        max(finite, default=0),
    }
    assert (None in drawn["y"]) == any(not math.isfinite(value) for value in values)


@given(names)
def test_element_escapes_any_text(name):
    made = util_html.element("p", name, title=name)
    [(tag, given, _)] = Elements(str(made)).found
    assert tag == "p"
    assert given.keys() == {"title"}
    made.encode()


# ---- the page -----------------------------------------------------------------------


def _text(page):
    return "".join(text for _, _, text in Elements(page).found)


def test_page_is_well_formed_and_loads_nothing(run):
    page = _report.page(gather(run, keep=KEEP))
    found = Elements(page).found
    tags = [tag for tag, _, _ in found]
    assert {*tags}.isdisjoint({"img", "iframe", "object", "embed"})
    assert tags.count("script") == 1
    named = {name for _, given, _ in found for name in given}
    assert not {n for n in named if n == "style" or n.startswith("on")}
    loaded = [
        given[name]
        for tag, given, _ in found
        for name in ("href", "src")
        if name in given
    ]
    assert all(link.startswith("#") or link == "data:," for link in loaded)
    pictures = [given for tag, given, _ in found if tag == "svg"]
    assert all(
        "aria-label" in g or "aria-hidden" in g or g.get("class") == "place"
        for g in pictures
    )
    heads = [given for tag, given, _ in found if tag == "th"]
    assert all("scope" in given for given in heads)


def test_names_from_checkpoint_are_never_markup(tmp_path):
    bad = "<script>alert(1)</script>\"'&"
    with flaxckpt.Checkpointer(tmp_path / "run") as opened:
        for step in (1, 2):
            state = {bad: {"<img src=x onerror=alert(1)>": jnp.full(3, step)}}
            opened.save(step, state, metrics={bad: step, "\u202e\x1b[31m": step})
    page = _report.page(gather(tmp_path / "run"))
    tags = [tag for tag, _, _ in Elements(page).found]
    assert tags.count("script") == 1
    assert "img" not in tags
    assert "&lt;script&gt;" in page
    assert "\x1b" not in page
    assert "\u202e" not in page


@pytest.mark.parametrize("name", ["run", "\U0001f680", "it's", 'a"b', "a\\b"])
def test_code_to_copy_names_any_path(run, name):
    path = f"/runs/{name}"
    page = _report.page(dataclasses.replace(gather(run), path=path))
    copied = [each["data-copy"] for each in Elements(page).with_data("data-copy")]
    code = ast.parse(copied[0].replace("{step}", "1"))
    texts = [each.value for each in ast.walk(code) if isinstance(each, ast.Constant)]
    assert path in texts
    assert path in shlex.split(copied[2])


@pytest.mark.slow
def test_page_of_many_steps_and_leaves_stays_small(run):
    small = gather(run, keep=KEEP)
    steps, saves = small.steps, small.saves
    measured = small.metrics["eval/loss"]
    changed = [*small.change.changed.values()]
    found = dataclasses.replace(
        small,
        steps=tuple(
            dataclasses.replace(steps[n % 6], step=n, marks=()) for n in range(3000)
        ),
        history=tuple(
            dataclasses.replace(small.history[n % 8], step=n) for n in range(3000)
        ),
        saves=tuple(dataclasses.replace(saves[n % 8], step=n) for n in range(3000)),
        metrics={
            f"metric_{n}": tuple(
                measured[m % 6]._replace(step=m, mode=None) for m in range(3000)
            )
            for n in range(30)
        },
        change=dataclasses.replace(
            small.change, changed={f"leaf/{n}": changed[0] for n in range(10_000)}
        ),
        positions=tuple(small.positions[0]._replace(step=n) for n in range(200)),
        integrity=tuple(small.integrity[0]._replace(step=n) for n in range(3000)),
    )
    page = _report.page(found)
    assert len(page.encode()) < 2 * 10**6
    found = Elements(page)
    assert len(found.with_data("data-path", "data-rel")) == 100
    assert "The 100 that changed most" in page
    assert len(found.with_data("data-step", "id")) == 100


def test_groups_ten_thousand_leaves_into_few_parts(tmp_path):
    leaves = {
        f"model/layer_{n // 10}/part_{n % 10}/w": _info(
            f"model/layer_{n // 10}/part_{n % 10}/w", n % 10 + 1
        )
        for n in range(10_000)
    }
    found = _report.parts.divide(subtrees.subtrees(leaves))
    assert len(found) <= 60
    assert sum(part.leaves for part in found) == 10_000
    assert sum(part.bytes for part in found) == 55_000


@pytest.mark.slow
def test_example_page_has_every_section(tmp_path):
    run = examples_report.make(tmp_path, first_steps=10, second_steps=30)
    found = gather(run, keep=examples_report.KEEP)
    assert found.notes == {}
    assert found.lineage[0].path == str(tmp_path / "pretrained" / "10")
    assert [e.step for e in found.happened if e.kind == "restored"][-1] == 17
    norms = {leaf.path: leaf.norms for leaf in found.leaf_histories}
    kernel = norms["params/embed/kernel"]
    assert list(kernel) == [10, 17, 20, 30]
    saved = flaxckpt.load(run, step=30).params["embed"]["kernel"]
    assert kernel[30] == pytest.approx(float(np.linalg.norm(saved)), rel=0.2)
    shown = Elements(_report.page(found)).with_data("data-path", "data-norm")
    assert [row["data-path"] for row in shown] == list(norms)[:300]
    assert shown[0]["data-path"].startswith("params/")
    titles = Elements(_report.page(found)).with_data("aria-labelledby")
    assert [given["id"] for given in titles] == [
        *("metrics", "leaves", "steps", "saves", "integrity", "lineage", "dataset"),
        *("change", "sizes"),
    ]


# ---- in notebooks -------------------------------------------------------------------


def test_checkpointer_shows_card_in_notebooks(run):
    with flaxckpt.Checkpointer(run, keep=KEEP) as opened:
        card = opened._repr_html_()
        reasons = opened.explain()
    rows = Elements(card).with_data("data-step")
    assert [int(row["data-step"]) for row in rows] == sorted(reasons, reverse=True)
    text = _text(card)
    assert "newest 80" in text
    assert "best 50" in text
    for step, why in reasons.items():
        assert ", ".join(why) in text.replace("\n", "")
        assert f"{LOSSES[step]:.4g}" in text


def test_notebook_card_names_best_of_each_metric(tmp_path):
    best = flaxckpt.policies.BestN
    ranked_run(tmp_path / "run", best(2, "loss", "min"), best(1, "accuracy", "max"))
    with flaxckpt.Checkpointer(tmp_path / "run", read_only=True) as opened:
        card = opened._repr_html_()
    assert "newest 3, best loss 2, best accuracy 3<" in card


def test_shows_card_during_save_and_after_deletion_of_run(tmp_path):
    opened = flaxckpt.Checkpointer(tmp_path / "run")
    assert "0 steps" in opened._repr_html_()
    handle = opened.save(1, state_at(1))
    assert "Checkpointer run" in opened._repr_html_()
    handle.wait()
    shutil.rmtree(tmp_path / "run")
    assert "Checkpointer run" in opened._repr_html_()


def test_card_reports_failing_metrics(tmp_path):
    def fails():
        raise RuntimeError("<b>no connection</b>")

    opened = flaxckpt.Checkpointer(tmp_path / "run", metrics_from=fails)
    opened.save(1, {"w": np.ones(2)}).wait()
    card = opened._repr_html_()
    assert "no connection" in card
    assert "<b>" not in card


def test_fully_changed_comparison_counts_no_other_leaves(tmp_path):
    with flaxckpt.Checkpointer(tmp_path / "run") as ckpt:
        for step in (1, 2):
            ckpt.save(step, {"w": np.full(3, step)})
    text = _text(_report.page(gather(tmp_path / "run")))
    assert "From step 1 to step 2, 1 leaf changed." in text


# ---- the verdict --------------------------------------------------------------------


def verdict(report):
    return _report.flight_recorder.judge(report)


def test_verdict_counts_torn_lines_of_journal(run):
    with (run / "events.jsonl").open("ab") as file:
        file.write(b'{"time": 17\n{"time": 18')
    text = verdict(gather(run)).text
    assert ", 2 lines of its journal cannot be read, best 0.3" in text


def test_verdict_is_good_only_after_every_byte_was_read(run):
    looked_at = verdict(gather(run))
    assert looked_at.state == "unverified"
    assert looked_at.text.startswith("Healthy so far, ")
    assert "flaxckpt verify checks every byte" in _text(_report.page(gather(run)))
    verified = verdict(gather(run, verify=True))
    assert (verified.state, verified.text[:9]) == ("good", "Healthy, ")


def test_verdict_on_healthy_run_names_best_step(run, tmp_path):
    assert verdict(gather(run)) == (
        "unverified",
        "Healthy so far, best 0.3 at step 50 (eval/loss).",
    )
    found = gather(run, keep=[])
    assert verdict(found).text == "Healthy so far, last 0.52 at step 80 (eval/loss)."
    flaxckpt.Checkpointer(tmp_path / "new").close()
    assert verdict(gather(tmp_path / "new")) == ("idle", "No steps yet.")


def test_verdict_names_damaged_steps_and_newest_good_one(run):
    damage(run / "70")
    damage(run / "80")
    text = "Two damaged steps (70, 80), newest {}"
    known = {
        "good 60": gather(run, verify=True),
        "other 60 (files complete, not read)": gather(run),
    }
    for newest, found in known.items():
        assert verdict(found).text.startswith(text.format(newest))
    unseen = [
        check._replace(state="unknown") if check.step == 60 else check
        for check in found.integrity
    ]
    found = dataclasses.replace(found, integrity=tuple(unseen))
    assert verdict(found).text.startswith(text.format("other 60 (not looked at)"))
    assert verdict(gather(run / "80")).text == "The checkpoint is damaged."


def test_verdict_counts_restarts_followed_by_saves(run):
    assert _report.flight_recorder.find_resumes(gather(run)) == []
    for step in (90, 100):
        with flaxckpt.Checkpointer(run, keep=KEEP) as again:
            again.restore(state_at(0))
            again.save(step, state_at(step), metrics={"eval/loss": 0.5})
    found = gather(run)
    resumes = _report.flight_recorder.find_resumes(found)
    assert [(r.stopped, r.step) for r in resumes] == [(80, 80), (90, 90)]
    assert verdict(found).text.startswith("Healthy so far, resumed twice, best 0.3")
    events = charts_of(_report.page(found))["events"]
    kinds = ("stopped", "resumed")
    assert [e[:2] for e in events] == [[n, kind] for n in (80, 90) for kind in kinds]


@pytest.mark.parametrize("is_kept", [True, False])
def test_verdict_reports_divergence(tmp_path, is_kept):
    keep = [BestN(1, "loss", "min")] if is_kept else [LatestN(1)]
    with flaxckpt.Checkpointer(tmp_path / "run", keep=keep) as saved:
        for step, loss in ((1, 0.5), (2, 0.4), (3, np.nan), (4, np.inf)):
            saved.save(step, {"w": np.ones(2)}, metrics={"ok": 1.0, "loss": loss})
    found = gather(tmp_path / "run")
    what = "is kept" if is_kept else "was deleted"
    where = "" if is_kept else " in loss"  # no policy makes it the first metric
    text = f"Diverged at 3: NaN since{where}; last finite step 2 {what}"
    assert verdict(found).text.startswith(text)
    assert verdict(found).state == "bad"
    wanted = 2 if is_kept else 4
    assert _report.flight_recorder.choose_step(found) == wanted


def test_damage_not_the_jump_is_why_an_earlier_step_is_offered(tmp_path):
    with flaxckpt.Checkpointer(tmp_path / "run") as run:
        on_step = flaxckpt.CheckpointCallback(
            run, every_steps=1, statistics=True, check_step=False
        )
        for step, value in enumerate((1.0, 9.0, 9.0, np.nan), start=1):
            on_step(step, {"a": np.full(4, value)}, metrics={"loss": value})
    (tmp_path / "run/3/flaxckpt.json").write_text("{")
    found = gather(tmp_path / "run")
    assert _report.flight_recorder.choose_step(found) == 1
    assert "; a jumped first, at 2; " in verdict(found).text


def test_diverged_run_continues_from_last_remaining_finite_step(tmp_path):
    keep = [BestN(1, "loss", "max"), LatestN(2)]
    with flaxckpt.Checkpointer(tmp_path / "run", keep=keep) as saved:
        for step, loss in ((1, 0.5), (2, 0.4), (3, np.nan), (4, np.inf)):
            saved.save(step, {"w": np.ones(2)}, metrics={"loss": loss})
    found = gather(tmp_path / "run")
    assert "last finite step 2 was deleted, 1 is left" in verdict(found).text
    assert _report.flight_recorder.choose_step(found) == 1
    assert _report.flight_recorder.choose_pair(found) == (1, 3)
    with flaxckpt.Checkpointer(tmp_path / "run", keep=keep) as again:
        for step in (3, 4):
            again.delete(step)
        again.save(2, {"w": np.ones(2)}, metrics={"loss": 0.3})
    found = gather(tmp_path / "run")
    assert verdict(found).text.startswith("Healthy so far, best 0.5 at step 1")
    assert _report.flight_recorder.choose_step(found) == 2


@pytest.mark.parametrize(
    ("keep", "wanted"),
    [
        ([BestN(1, "loss", "min"), LatestN(2)], (3, 5)),
        ([LatestN(9)], (3, 4)),
        ([BestN(2, "loss", "min")], (2, 3)),
        ([LatestN(1)], (None, 6)),
    ],
)
def test_compares_steps_around_divergence(tmp_path, keep, wanted):
    with flaxckpt.Checkpointer(tmp_path / "run", keep=keep) as saved:
        for step in range(1, 7):
            loss = 1 / step if step < 4 else np.nan
            saved.save(step, {"w": np.ones(2)}, metrics={"loss": loss})
    found = gather(tmp_path / "run")
    if wanted == (2, 3):  # no step after it is left
        steps = tuple(step for step in found.steps if step.step < 4)
        found = dataclasses.replace(found, steps=steps)
    elif None not in wanted:
        assert found.compared == wanted
    assert _report.flight_recorder.choose_pair(found) == wanted


def test_compares_newest_steps_without_divergence(run):
    choose = _report.flight_recorder.choose_pair
    assert choose(gather(run)) == (70, 80)
    assert choose(gather(run), b=20) == (40, 20)


def test_shows_nan_for_leaf_without_finite_values(tmp_path):
    with flaxckpt.Checkpointer(tmp_path / "run") as run:
        on_step = flaxckpt.CheckpointCallback(
            run, every_steps=1, statistics=True, check_step=False
        )
        for step in (1, 2):
            on_step(step, {"lost": np.full(9, np.nan), "zero": np.zeros(9)})
    page = _report.page(gather(tmp_path / "run"))
    cells = re.findall(r'<tr[^>]*data-path="(\w+)"[^>]*>(.*?)</tr>', page)
    texts = {path: re.findall("<td[^>]*>(.*?)</td>", row) for path, row in cells}
    assert texts["lost"] == ["NaN", "NaN", "NaN", "NaN", "9"]
    assert texts["zero"] == ["0", "0", "0", "0", ""]


def test_verdict_reports_failed_last_save(run):
    found = gather(run)
    lost = dataclasses.replace(found.saves[-1], outcome="failed", error="no space")
    failed = dataclasses.replace(found, saves=(*found.saves[:-1], lost))
    assert verdict(failed).text.startswith("The last save of step 80 failed; best 0.3")


def test_report_of_thousand_steps_stays_small(run):
    found = gather(run)
    loss = found.metrics["eval/loss"][0]
    changed = next(iter(found.change.changed.values()))
    many = dataclasses.replace(
        found,
        history=tuple(
            dataclasses.replace(found.history[0], step=n) for n in range(1000)
        ),
        saves=tuple(dataclasses.replace(found.saves[0], step=n) for n in range(1000)),
        metrics={
            name: tuple(
                loss._replace(step=n, value=math.sin(n) / 3) for n in range(1000)
            )
            for name in ("a", "b", "c")
        },
        change=dataclasses.replace(
            found.change,
            changed={f"layers/block_{n}/down/kernel": changed for n in range(100)},
        ),
    )
    assert len(_report.page(many).encode()) < 350_000, "and 50 kB for statistics"
