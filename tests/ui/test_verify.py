"""Verification on the page finds what `verify` finds; only what was read is green."""

import html
import json
import os
import re
import shlex
import subprocess
import sys
import time

import numpy as np
import pytest

import flaxckpt
from tests.helpers import seams
from tests.helpers.files import flip_bit, largest_file
from tests.helpers.report_runs import charts_of, damage
from tests.ui.test_views import STATES, ask, open_page

pytest.importorskip("starlette", reason="starlette is missing")
pytest.importorskip("uvicorn", reason="uvicorn is missing")

__all__ = ["open_page"]

PATIENCE_SECS = 120


@pytest.fixture
def run(tmp_path):
    """A run with the steps 1, 2 and 3."""
    with flaxckpt.Checkpointer(tmp_path / "run") as made:
        for step in (1, 2, 3):
            made.save(step, {"w": np.full((64, 8), step), "n": step})
    return tmp_path / "run"


def verified(space, **fields):
    """Verifies a step as a reader who waits for the result."""
    ask("/verify/start", space, **fields)
    while space.verifications.job.is_running:
        time.sleep(0.01)
    return html.unescape(ask("/verify/status", space, run=fields["run"]))


def wait_for(is_so):
    """Waits for what a poll finds in the end: only a fault takes so long."""
    end = time.monotonic() + PATIENCE_SECS
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.01)


def news(space):
    return ask("/news", space, run="run")


def states(markup):
    """Returns the last step of each range of the table -> its state."""
    rows = re.findall(r'data-step="(\d+)" data-first.*?data-state="(\w+)"', markup)
    return {int(step): state for step, state in rows}


@pytest.mark.parametrize("kind", STATES)
def test_reports_good_checkpoint_as_whole(tmp_path, open_page, kind):
    flaxckpt.save(tmp_path / "one", STATES[kind]())
    space = open_page(tmp_path / "one")
    shown = verified(space, run="one")
    assert "one is whole" in shown
    assert "outcome good" in shown
    assert 'class="state verified"' in ask("/run", space, run="one")


def test_marks_only_read_step_as_verified(run, open_page):
    space = open_page(run)
    before = ask("/run", space, run="run")
    assert "state verified" not in before
    assert 'href="/verify?run=run"' in before
    shown = verified(space, run="run", step=2)
    assert "Step 2 of run is whole" in shown
    assert states(shown) == {1: "whole", 2: "verified", 3: "whole"}
    assert "All" not in shown


def test_page_shows_damaged_files_and_leaves(run, open_page):
    flip_bit(largest_file(run / "2" / "state"))
    space = open_page(run)
    shown = verified(space, run="run", step="all")
    assert "outcome bad" in shown
    assert "1 of 3 steps damaged: 2" in shown
    assert states(shown) == {1: "verified", 2: "damaged", 3: "verified"}
    truth = flaxckpt.verify(run, step=2)
    for name, why in truth.problems.items():
        assert f'data-place="{truth.places.get(name, name)}"' in shown
        assert why in shown
    assert f"1 file is at fault; {truth.summary}</summary>" in shown
    assert "Step 2 is damaged, newest good 3" in ask("/run", space, run="run")


def test_reports_unreadable_manifest_as_damage(run, open_page):
    (run / "3" / "flaxckpt.json").write_text("{")
    shown = verified(open_page(run), run="run", step=3)
    assert "Step 3 of run is damaged" in shown
    assert "no leaf can be read: " in shown
    assert "at fault" not in shown


def test_overwritten_step_is_no_longer_verified(run, open_page):
    space = open_page(run)
    verified(space, run="run", step=3)
    with flaxckpt.Checkpointer(run) as again:
        again.save(3, {"w": np.zeros((64, 8)), "n": 3}, overwrite=True)
    space.feeds._feeds[run]._gather()
    shown = ask("/verify/status", space, run="run")
    assert "outcome good" not in shown
    assert "Since then, it was saved again." in shown
    assert "check verified" not in shown
    assert "check verified" not in ask("/run", space, run="run")


def test_does_not_report_deleted_step_as_damaged(run, open_page):
    space = open_page(run)
    [place] = space.places.runs.values()
    steps = space.feeds.latest(place).report.steps
    with flaxckpt.Checkpointer(run) as again:
        again.delete(1)
    space.verifications.start(place, steps)
    while space.verifications.job.is_running:
        time.sleep(0.01)
    found = [each.integrity.state for each in space.verifications.job.results]
    assert found == ["unknown", "verified", "verified"]


def test_reports_leaves_without_checksums_as_only_read(tmp_path, open_page):
    layout = flaxckpt.ArrayLayout(checksum=False)
    flaxckpt.save(tmp_path / "one", {"w": np.ones(9)}, layout=layout)
    assert "without checksums: only read" in verified(
        open_page(tmp_path / "one"), run="one"
    )


def test_counts_many_faults_and_shows_first_ones(tmp_path, open_page):
    state = {f"layer_{n}": np.full(5, n) for n in range(130)}
    flaxckpt.save(tmp_path / "one", state)
    file = tmp_path / "one/state/d/0.small.0"
    file.write_bytes(bytes(255 - byte for byte in file.read_bytes()))
    space = open_page(tmp_path / "one")
    shown = verified(space, run="one")
    assert "The first 100 of 130 faults" in shown
    assert shown.count("data-place=") == 100


def test_limits_number_of_results(tmp_path, open_page, run, monkeypatch):
    seams.replace(monkeypatch, "ui_verifications.most_results", 2)
    space = open_page(run)
    shown = verified(space, run="run", step="all")
    assert "All 3 steps are whole" in shown
    assert states(shown) == {2: "verified", 3: "whole"}  # 3 was read first


@pytest.mark.parametrize("kind", ["memory", "moto"])
def test_verifies_runs_in_object_stores(store_path, open_page, kind):
    root = store_path(kind)
    with flaxckpt.Checkpointer(root / "run") as made:
        for step in (1, 2):
            made.save(step, {"w": np.full(3, step)})
    shown = verified(open_page(root / "run"), run="run", step="all")
    assert "All 2 steps are whole" in shown


@pytest.mark.parametrize("step", [2, 3])
def test_page_gives_command_to_mark_damage(run, open_page, step):
    if step == 3:  # the sizes of the newest step are known without reading it
        damage(run / "3")
    else:
        flip_bit(largest_file(run / "2" / "state"))
    space = open_page(run)
    assert "--mark" not in verified(space, run="run", step=1)
    shown = verified(space, run="run", step="all")
    [command] = re.findall("<pre>(.*)</pre>", shown)
    assert command == f"flaxckpt verify {run} {step} --mark"
    assert cli(*shlex.split(command)[1:]).returncode == 1
    space.feeds._feeds[run]._gather()
    assert "--mark" not in ask("/verify/status", space, run="run")
    assert flaxckpt.Checkpointer(run).steps() == [n for n in (1, 2, 3) if n != step]


@pytest.mark.slow
def test_page_gives_command_to_remove_mark_of_good_step(run, open_page):
    chunk = largest_file(run / "2" / "state")
    content = chunk.read_bytes()
    flip_bit(chunk)
    cli("verify", run, 2, "--mark")
    chunk.write_bytes(content)
    space = open_page(run)
    shown = verified(space, run="run", step=2)
    assert "Marked as damaged, although every byte is good: step 2." in shown
    assert "No array was read" not in shown
    [command] = re.findall("<pre>(.*)</pre>", shown)
    assert cli(*shlex.split(command)[1:]).returncode == 0
    assert flaxckpt.Checkpointer(run).steps() == [1, 2, 3]


@pytest.mark.slow
def test_mark_after_verification_ends_its_result(run, open_page):
    space = open_page(run)
    good = verified(space, run="run", step=3)
    assert re.search(r"Step 3 of run is whole, verified at [0-9]+:", good)
    flip_bit(largest_file(run / "3" / "state"))
    cli("verify", run, 3, "--mark")
    space.feeds._feeds[run]._gather()
    shown = ask("/verify/status", space, run="run", step=3)
    assert "outcome bad" in shown
    assert re.search(r"Step 3 of run was whole when verified at [0-9]+:", shown)
    assert re.search("Since then, it was marked as damaged at [0-9]+:", shown)
    assert "every byte is good" not in shown
    assert states(shown) == {2: "whole", 3: "damaged"}
    assert ">only step 3, damaged</option>" in ask("/verify", space, run="run", step=2)


def test_mark_in_store_ends_verification_result(store_path, open_page):
    root = store_path("memory")
    with flaxckpt.Checkpointer(root / "run") as made:
        made.save(1, {"w": np.full(3, 1)})
    space = open_page(root / "run")
    assert "outcome good" in verified(space, run="run", step=1)
    marker = {"time": time.time(), "reason": "lost"}
    (root / "run/1/DAMAGED").write_bytes(json.dumps(marker).encode())
    [feed] = space.feeds._feeds.values()
    feed._gather()
    shown = ask("/verify/status", space, run="run", step=1)
    assert "outcome bad" in shown
    assert "Since then, it was marked as damaged" in shown


@pytest.mark.slow
def test_mark_in_journal_ends_verification_result(run, open_page):
    space = open_page(run)
    verified(space, run="run", step=3)
    chunk = largest_file(run / "3" / "state")
    content, status = chunk.read_bytes(), chunk.stat()
    flip_bit(chunk)
    cli("verify", run, 3, "--mark")
    (run / "3" / "DAMAGED").unlink()
    chunk.write_bytes(content)
    os.utime(chunk, ns=(status.st_atime_ns, status.st_mtime_ns))
    space.feeds._feeds[run]._gather()
    shown = ask("/verify/status", space, run="run", step=3)
    assert "outcome open" in shown
    assert "Since then, it was marked as damaged" in shown


def test_does_not_show_repaired_step_as_damaged(run, open_page):
    chunk = largest_file(run / "2" / "state")
    content = chunk.read_bytes()
    flip_bit(chunk)
    space = open_page(run)
    assert "Step 2 of run is damaged" in verified(space, run="run", step=2)
    chunk.write_bytes(content)
    wait_for(lambda: "outcome open" in ask("/verify/status", space, run="run", step=2))
    shown = ask("/verify/status", space, run="run", step=2)
    assert "Step 2 of run was damaged when verified at" in shown
    assert "Since then, it has changed on the disk." in shown
    assert "--mark" not in shown
    assert "is damaged" not in ask("/run", space, run="run")
    shown = ask("/verify", space, run="run")
    first, every, other = re.findall(">([^<]*)</option>", shown)[:3]
    assert (first, other) == ("only step 3, latest", "only step 2")
    assert every.startswith("all 3 steps, ")


@pytest.mark.slow
def test_removal_of_mark_ends_verification_result(run, open_page):
    chunk = largest_file(run / "2" / "state")
    content = chunk.read_bytes()
    flip_bit(chunk)
    cli("verify", run, 2, "--mark")
    space = open_page(run)
    assert "Step 2 of run is damaged" in verified(space, run="run", step=2)
    chunk.write_bytes(content)
    cli("verify", run, 2, "--mark")
    space.feeds._feeds[run]._gather()
    shown = ask("/verify/status", space, run="run", step=2)
    assert re.search("Since then, it was found to be good at [0-9]+:", shown)
    assert "outcome open" in shown


def test_changed_files_end_verification_result(run, open_page):
    space = open_page(run)
    verified(space, run="run", step="all")
    version = news(space).version
    flip_bit(largest_file(run / "1" / "state"))
    wait_for(lambda: news(space).version != version)
    shown = ask("/verify/status", space, run="run", step="all")
    assert states(shown) == {1: "whole", 3: "verified"}
    assert "Since then, step 1 has changed on the disk." in shown
    assert "outcome open" in shown


@pytest.mark.slow
def test_consistent_changes_keep_verification_result(run, open_page):
    chunk = largest_file(run / "2" / "state")
    content = chunk.read_bytes()
    flip_bit(chunk)
    cli("verify", run, 2, "--mark")
    chunk.write_bytes(content)
    space = open_page(run)
    with flaxckpt.Checkpointer(run) as made:
        verified(space, run="run", step=2)
        made.pin(3)
        cli("verify", run, 2, "--mark")
        made.delete(1)
    space.feeds._feeds[run]._gather()
    shown = ask("/verify/status", space, run="run", step=2)
    assert "outcome good" in shown
    assert states(shown) == {2: "verified", 3: "whole"}


def test_shows_result_only_for_its_own_step(run, open_page):
    with flaxckpt.Checkpointer(run) as made:
        made.delete(1)
    flip_bit(largest_file(run / "2" / "state"))
    space = open_page(run)
    assert "Step 2 of run is damaged" in verified(space, run="run", step=2)
    for step in (1, 3):
        shown = ask("/verify", space, run="run", step=step)
        assert "outcome" not in shown
        assert 'class="faults"' not in shown
        assert "--mark" not in shown
    assert "run has no step 1 to verify" in ask("/verify", space, run="run", step=1)
    for fields in ({}, {"step": 2}):  # without a step, the one that was verified
        shown = ask("/verify", space, run="run", **fields)
        assert '<option value="2" selected' in shown
        assert "Step 2 of run is damaged" in shown
        assert 'class="faults"' in shown


def test_verification_changes_version_of_pages(run, open_page):
    space = open_page(run)
    ask("/run", space, run="run")  # the first report
    before = news(space).version
    verified(space, run="run", step=2)
    space.verifications.job._thread.join()
    after = news(space).version
    assert after != before
    assert f'version={after}"' in ask("/run", space, run="run")


def test_suggests_no_mark_for_checkpoint_outside_run(tmp_path, open_page):
    flaxckpt.save(tmp_path / "one", {"w": np.arange(99.0)})
    flip_bit(largest_file(tmp_path / "one" / "state"))
    shown = verified(open_page(tmp_path / "one"), run="one")
    assert "one is damaged" in shown
    assert "--mark" not in shown


@pytest.mark.slow
def test_damaged_step_is_no_longer_best(tmp_path, open_page):
    keep = [flaxckpt.policies.BestN(1, "loss", "min"), flaxckpt.policies.LatestN(2)]
    with flaxckpt.Checkpointer(tmp_path / "run", keep=keep) as made:
        for step, loss in ((1, 0.5), (2, 0.1), (3, 0.4)):
            made.save(step, {"w": np.full((64, 8), step)}, metrics={"loss": loss})
    flip_bit(largest_file(tmp_path / "run" / "2" / "state"))
    space = open_page(tmp_path / "run")
    assert marks(ask("/run", space, run="run"))[2] == ["best"]
    verified(space, run="run", step="all")
    shown = ask("/run", space, run="run")
    assert marks(shown) == {1: ["deleted"], 2: ["damaged"], 3: ["latest", "best"]}
    assert "because it is not marked as damaged" in shown
    [loss] = charts_of(shown)["metrics"]
    assert loss["facts"].startswith("best 0.4 at step 3, ")
    assert "best 0.1" not in shown
    clause = "lowest, at step 3; step 2 with 0.1 would be better, but is damaged"
    assert (
        f"{clause}; policies count it until flaxckpt verify --mark marks it<" in shown
    )
    assert loss["state"] == "dxb"
    assert charts_of(shown)["steps"]["state"] == "dxb"
    chosen = ask("/verify", space, run="run")
    assert ">only step 2, damaged</option>" in chosen
    cli("verify", tmp_path / "run", 2, "--mark")
    space.feeds._feeds[tmp_path / "run"]._gather()
    shown = ask("/run", space, run="run")
    assert marks(shown) == {1: ["deleted"], 2: ["damaged"], 3: ["latest", "best"]}
    assert f"{clause}<" in shown


def marks(shown):
    """Returns step -> its marks in the table of steps."""
    rows = re.findall(r'<tr[^>]* id="step-(\d+)".*?</tr>', shown)
    whole = {n: re.search(rf'id="step-{n}".*?</tr>', shown)[0] for n in rows}
    return {
        int(n): re.findall('class="mark [^"]*">([^<]*)<', row)
        for n, row in whole.items()
    }


def cli(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "flaxckpt", *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
