"""Many runs, odd ones, and runs that go away while a page shows them."""

import shutil

import numpy as np
import pytest

import flaxckpt
from flaxckpt.policies import BestN
from tests.helpers.ui_server import serving
from tests.ui.test_browser import Page, browser, sync_api  # noqa: F401

expect = sync_api.expect
HOSTILE = "<img src=x onerror=\"document.title='run'\">"
COUNT = 100
LONG = "a-long-metric"


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """A hundred runs and four odd ones, three of which come first."""
    root = tmp_path_factory.mktemp("odd")
    with flaxckpt.Checkpointer(root / "run-00") as run:
        for step in (1, 2):
            run.save(step, {"w": np.full(3, step)}, metrics={"loss": 1 / step})
    for n in range(1, COUNT):
        shutil.copytree(root / "run-00", root / f"run-{n:02}")
    journal = shutil.copytree(root / "run-00", root / "a-damaged-journal")
    (journal / "events.jsonl").write_bytes(b"\x00\xff{}\n[1]\nnull\n{")
    shutil.copytree(root / "run-00", root / ("b" * 250))
    shutil.copytree(root / "run-00", root / HOSTILE)
    long = "m" * 500
    with flaxckpt.Checkpointer(root / LONG, keep=[BestN(1, long, "min")]) as run:
        run.save(1, {"w": np.zeros(3)}, metrics={long: 1.0})
    with serving(root) as server:
        server.root = root
        yield server


def read_all(found):
    expect(found.page.locator("#runs .message")).to_have_count(0)
    return found.page.locator("#all-runs tr[data-run]")


@pytest.mark.parametrize("width", [390, 1280])
def test_page_shows_hundred_runs(browser, served, width):  # noqa: F811
    found = Page(browser, served, width=width)
    page = found.page
    rows = read_all(found)
    expect(rows).to_have_count(60)
    names = page.locator("#all-runs tr[data-run], #all-runs .more li")
    assert names.count() == COUNT + 4 == len(list(served.root.iterdir()))
    curve = page.locator("figure[data-metric=loss] .u-over")
    curve.hover()  # scrolls, which hides what is said of a point
    curve.hover(position={"x": 60, "y": 60})
    tip = page.locator(".tip")
    expect(tip).to_contain_text("loss, step")
    expect(tip).to_be_visible()
    assert tip.bounding_box()["height"] < 900, "it fits the window"
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    button = page.locator(f"button[data-series={'b' * 250}]")
    assert button.bounding_box()["height"] < 40, "a long name takes one line"
    cell = page.locator(f"#all-runs tr[data-run={LONG}] td:nth-child(3)")
    assert cell.bounding_box()["width"] < 300
    page.locator("#news").evaluate(
        "each => { each.textContent = 'step 1 '.repeat(40); }"
    )
    assert page.locator("header h1").bounding_box()["width"] > 120
    assert found.is_quiet, found.messages
    found.context.close()


@pytest.mark.parametrize(
    ("run", "said"),
    [
        ("a-damaged-journal", "has no event that can be read"),
        (
            "a-damaged-journal",
            "Healthy so far, its journal cannot be read, last 0.5 at",
        ),
        ("b" * 250, "Healthy"),
        (LONG, "Healthy"),
        (HOSTILE, "Healthy"),
    ],
)
def test_odd_run_renders_without_errors(browser, served, run, said):  # noqa: F811
    found = Page(browser, served, width=390)
    page = found.open("/run", run=run)
    expect(page.locator("#saves")).to_be_visible()
    assert said in page.inner_text("main")
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    assert found.is_quiet, found.messages
    found.context.close()


def test_page_reports_deletion_of_shown_run(browser, served):  # noqa: F811
    whole, single = (Page(browser, served) for _ in range(2))
    rows = read_all(whole)
    page = single.open("/run", run="run-01")
    expect(page.locator("#steps tr[data-step='2']")).to_be_visible()
    expect(page.locator("#news")).to_have_text("up to date")
    shutil.rmtree(served.root / "run-01")
    expect(page.locator("[role=alert]")).to_contain_text("no run or checkpoint")
    expect(rows.and_(whole.page.locator("[data-run=run-01]"))).to_have_count(0)
    expect(rows).to_have_count(60)
    assert whole.is_quiet, whole.messages
    for found in (whole, single):
        found.context.close()
