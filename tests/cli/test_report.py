"""`flaxckpt report`: its output, its file and its errors."""

import json

import numpy as np
import pytest

import flaxckpt
from tests.helpers import chunks, run_files


def test_report_writes_page_and_names_it(here, command):
    [line] = command.text("report", "run")
    assert line.startswith("wrote report.html: 3 steps, ")
    page = (here / "report.html").read_text(encoding="utf-8")
    assert page.startswith("<!doctype html>")
    assert page.rstrip().endswith("</html>")


def test_report_replaces_older_page(here, command):
    command("report", "run", "-o", "other.html")
    first = (here / "other.html").read_bytes()
    with flaxckpt.Checkpointer(here / "run") as run:
        run.save(400, {"w": np.ones(2)})
    command("report", "run", "-o", "other.html")
    assert (here / "other.html").read_bytes() != first
    assert sorted(f.name for f in here.glob("*.html*")) == ["other.html"]


def test_json_matches_ls_and_writes_no_page_by_default(here, command):
    options = ("-k", "latest:1", "-k", "best:1:loss:min")
    found = command.json("report", "run", *options)
    assert found["ok"]
    assert not (here / "report.html").exists()
    listed = command.json("ls", "run", *options)
    assert found["steps"] == listed["steps"]
    assert found["bytes"] == listed["bytes"]
    assert found["policies"] == ["LatestN(1)", "BestN(1, 'loss', 'min')"]
    changed = command.json("diff", "run", "-a", 200, "-b", 300, code=1)["changed"]
    assert found["change"]["changed"] == changed
    lines = (here / "run" / "events.jsonl").read_text().splitlines()
    events = [json.loads(line) for line in lines]
    blocked = [e["details"]["blocked_secs"] for e in events if e["kind"] == "committed"]
    assert [save["blocked_secs"] for save in found["saves"]] == blocked
    command.json("report", "run", "-o", "page.html")
    assert (here / "page.html").exists()


def test_reads_policies_from_config(here, command):
    (here / "run.toml").write_text("keep = [{latest = 1}]\n")
    found = command.json("report", "run", "--config", "run.toml")
    assert [step["why"] for step in found["steps"]] == [
        [],
        [],
        ["newest", "LatestN(1)"],
    ]


def test_damage_exits_with_1_but_still_writes_page(here, command):
    run_files.mark_damaged(here / "run" / "300", "w: its checksum is another")
    first, last = command.text("report", "run", code=1)
    assert first == "step 300 is damaged: w: its checksum is another"
    assert last.startswith("wrote report.html")
    assert not command.json("report", "run", code=1)["ok"]


def test_verify_option_reads_every_byte(here, command):
    chunks.flip(here / "run/200/state", "params.dense.kernel/c.0.0")
    command("report", "run", "--no-diff")
    lines = command.text("report", "run", "--no-diff", "--verify", code=1)
    told = "step 200 is damaged: 1 of 8 leaves cannot be read: params/dense/kernel: "
    assert lines[0].startswith(told)


@pytest.mark.parametrize("name", ["orbax", "w.safetensors", "w.msgpack", "run/100"])
def test_report_supports_every_format(here, command, name):
    lines = command.text("report", name, "-o", "page.html")
    assert lines[-1].startswith("wrote page.html")
    assert command.json("report", name)["total_bytes"] > 0


def test_bad_usage_exits_with_2_and_writes_nothing(here, command, monkeypatch):
    assert "does not exist" in command.refuses("report", "nowhere")
    assert "is not a checkpoint" in command.refuses("report", "notes.txt")
    assert "has no step 7" in command.refuses("report", "run", "-a", 7)
    assert "with itself" in command.refuses("report", "run", "-a", 300)
    assert "--no-diff" in command.refuses("report", "run", "--no-diff", "-a", 100)
    assert "--keep latest" in command.refuses("report", "run", "--keep", "latest")
    assert "is not a directory" in command.refuses(
        "report", "run", "-o", "no/page.html"
    )
    refused = command.refuses("report", "run", "-o", "w.msgpack")
    assert "is not an HTML page" in refused
    assert "name it w.html" in command.refuses("report", "run", "-o", "w.pdf")
    refused = command.refuses("report", "run", "-o", "run/300/page.html")
    assert "would be in a checkpoint" in refused
    monkeypatch.chdir(here / "run")
    assert "among the steps of the run" in command.refuses("report", ".")
    assert not [*here.rglob("*.html")]


def test_writes_page_among_steps_on_request(here, command):
    command("report", "run", "-o", "run/report.html")
    assert command.text("ls", "run")[-1].startswith("3 steps")
    command("report", "run", "-o", "run/report.html")


def test_reports_run_in_store(here, command):
    with flaxckpt.Checkpointer("memory://cli-report/run") as run:
        for step in (1, 2):
            run.save(step, {"w": np.full(3, step, np.float32)})
    told, line = command.text("report", "memory://cli-report/run")
    assert told.startswith("1 of 2 steps were looked at: --verify")
    assert line.startswith("wrote report.html: 2 steps")
