"""Runs that lack something, have too much of it, or are damaged: the page says so."""

import json
import math

import numpy as np
import pytest

import flaxckpt
from tests.helpers.report_runs import page_of
from tests.report.test_browser import browser, show  # noqa: F401

HOSTILE = "</div></script><script>document.title='run'</script><!--\"'>"


def run_of(root, rows, state=None):
    """Saves steps with metrics and statistics; returns the run directory."""
    with flaxckpt.Checkpointer(root) as run:
        on_step = flaxckpt.CheckpointCallback(
            run, every_steps=1, statistics=True, check_step=False
        )
        for step, metrics in rows.items():
            on_step(step, state or {"w": np.full(3, step)}, metrics=metrics)
    return root


def delete_steps(root):
    run_of(root, {1: {}})
    with flaxckpt.Checkpointer(root) as run:
        run.delete(1)
    return root


def damage_journals(root):
    run_of(root, {1: {"m": 1.0}, 2: {"m": 0.5}})
    for journal in root.glob("*.jsonl"):
        whole = journal.read_bytes()
        journal.write_bytes(b"\x00\xff{}\n[1]\nnull\n" + whole[: len(whole) // 2])
    return root


def ten_thousand_steps(root):
    """A run whose journal has the saves and deletions of many steps."""
    run_of(root, {100_001: {"m": 1.0}, 100_002: {"m": 0.5}})
    rows = []
    for step in range(0, 100_000, 10):
        row = {"step": step, "path": str(root / f"{step}"), "time": 1e9 + step}
        saved = {"metrics": {"m": math.sin(step / 999)}, "total_secs": 1.0}
        rows.append({**row, "kind": "committed", "details": saved})
        deleted = {"reason": f"why {step % 7}"}
        rows.append({**row, "kind": "deleted", "details": deleted})
    journal = root / "events.jsonl"
    whole = "".join(f"{json.dumps(row)}\n" for row in rows)
    journal.write_text(whole + journal.read_text())
    return root


ODD = {
    "no steps": (lambda root: run_of(root, {}), "No steps yet."),
    "deleted steps": (delete_steps, "No step is left."),
    "one step": (
        lambda root: run_of(root, {5: {"m": 1.0}}),
        "Healthy so far, last 1 at step 5 (m).",
    ),
    "no metrics": (
        lambda root: run_of(root, {1: {}, 2: {}}),
        "No metrics are stored with the steps.",
    ),
    "only NaN": (
        lambda root: run_of(
            root, {1: {"m": math.nan}, 2: {"m": math.nan}}, {"w": np.full(3, math.nan)}
        ),
        "Diverged at 1: NaN since; no step has a finite value.",
    ),
    "damaged journals": (damage_journals, "2 existing steps"),
    "ten thousand steps": (ten_thousand_steps, "10,000 deleted"),
    "long names": (
        lambda root: run_of(
            root, {1: {"m" * 500: 1.0}, 2: {"m" * 500: 2.0}}, {"w" * 200: np.ones(3)}
        ),
        "m" * 500,
    ),
    "hostile names": (
        lambda root: run_of(
            root, {1: {HOSTILE: 1.0}, 2: {HOSTILE: 0.5}}, {HOSTILE: np.ones((2, 2))}
        ),
        HOSTILE,
    ),
}


@pytest.mark.parametrize("name", ODD)
def test_page_describes_unusual_run_without_errors(show, tmp_path, name):  # noqa: F811
    make, said = ODD[name]
    opened = show(page_of(make(tmp_path / "run")), width=390)
    page = opened.page
    assert said in page.inner_text("body")
    axes = page.locator("#recorder .u-axis, #recorder [aria-label=Steps]")
    assert axes.count() > 0 or name == "no steps"
    for section in page.query_selector_all("section > details:not([open]) > summary"):
        section.click()
    for selector in (".u-over", "canvas.lanes", "canvas.brush", ".heat canvas"):
        for each in page.query_selector_all(selector)[:2]:
            each.hover()
            each.click()
    for selector in ("canvas.lanes", "canvas.brush", ".u-over", ".layer"):
        if page.locator(selector).count():
            for key in ("End", "ArrowLeft", "Enter", "+", "ArrowRight", "-", "Escape"):
                page.locator(selector).first.press(key)
    assert opened.messages == []
    assert opened.requests == [opened.requests[0]]
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    assert page.title().endswith("flaxckpt report")


@pytest.mark.parametrize("name", ODD)
def test_unusual_run_renders_tables_without_script(browser, tmp_path, name):  # noqa: F811
    make, _ = ODD[name]
    made = page_of(make(tmp_path / "run"))
    file = tmp_path / "report.html"
    file.write_text(made, encoding="utf-8")
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(file.as_uri())
    counts = {"no steps": 0, "one step": 1, "deleted steps": 1}
    count = {**counts, "ten thousand steps": 100}.get(name, 2)
    assert page.locator("#steps tbody tr").count() == count
    assert page.locator(".verdict").is_visible()
    assert page.locator(".control:visible, .drawn:visible").count() == 0
    context.close()
