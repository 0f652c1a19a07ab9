"""The page of a report in a real browser.

Pictures of the pages go to FLAXCKPT_ARTIFACTS, if that is set.
"""

import dataclasses
import math
import os
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import flaxckpt
from flaxckpt import _report
from flaxckpt._inspect.history import SavedStep
from tests.helpers.browsers import browser, sync_api
from tests.helpers.printed import pages_of_table
from tests.helpers.report_runs import KEEP, LASTS, LOSSES, charts_of, make_run

__all__ = ["browser", "sync_api"]

WIDTHS = (360, 1280)
WIDEST = 1920


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    run = make_run(tmp_path_factory.mktemp("report"))
    options = _report.ReportOptions(KEEP, verify=True)
    return _report.gather(run, options)


class Opened:
    """A page in the browser, with its messages and requests."""

    def __init__(self, browser, file, width=1280, scheme="light"):
        self.messages, self.requests = [], []
        self.page = browser.new_page(
            viewport={"width": width, "height": 800}, color_scheme=scheme
        )
        self.page.on("console", lambda message: self.messages.append(message.text))
        self.page.on("pageerror", lambda error: self.messages.append(str(error)))
        self.page.on("dialog", lambda dialog: self.messages.append(dialog.message))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(file.as_uri())

    def data(self, selector):
        """Returns the data-* attributes of elements, by name."""
        return self.page.eval_on_selector_all(
            selector, "found => found.map(each => ({...each.dataset}))"
        )

    def texts(self, selector):
        """Returns the texts of elements."""
        return self.page.eval_on_selector_all(
            selector, "found => found.map(each => each.textContent)"
        )


@pytest.fixture
def show(browser, tmp_path):
    """A function that opens the page of a report, or a page."""
    shown = []

    def opened(report, **given):
        page = report if isinstance(report, str) else _report.page(report)
        file = tmp_path / "report.html"
        file.write_text(page, encoding="utf-8")
        shown.append(Opened(browser, file, **given))
        return shown[-1]

    yield opened
    for each in shown:
        each.page.close()


def picture(opened, tmp_path, name):
    directory = Path(os.environ.get("FLAXCKPT_ARTIFACTS") or tmp_path)
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"report-{name}.png"
    opened.page.screenshot(path=path, full_page=True)
    return path


@pytest.mark.sampled(3)
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", WIDTHS)
def test_page_logs_nothing_loads_nothing_and_fits(
    show, report, tmp_path, width, scheme
):
    opened = show(report, width=width, scheme=scheme)
    assert opened.messages == []
    assert opened.requests == [opened.page.url]
    opened.page.eval_on_selector_all(
        "details", "found => found.forEach(each => { each.open = true; })"
    )
    widest = opened.page.evaluate("document.documentElement.scrollWidth")
    assert widest <= width
    assert picture(opened, tmp_path, f"{scheme}-{width}").stat().st_size > 10_000


def test_long_run_page_logs_nothing_and_fits(show, report):
    measured = report.metrics["eval/loss"][0]
    many = range(0, 100_000, 100)
    long = dataclasses.replace(
        report,
        steps=tuple(dataclasses.replace(report.steps[0], step=n) for n in many),
        saves=tuple(dataclasses.replace(report.saves[0], step=n) for n in many),
        metrics={
            f"metric_{m}": tuple(
                measured._replace(step=n, value=math.sin(n / 999 + m), mode=None)
                for n in many
            )
            for m in range(14)
        },
    )
    for width in WIDTHS:
        opened = show(long, width=width)
        assert opened.messages == []
        assert opened.page.evaluate("document.documentElement.scrollWidth") <= width
    assert opened.page.locator("figure[data-metric] canvas").count() == 13


def luminance(colour):
    """Returns the luminance of `rgb(…)`, as WCAG defines it."""
    channels = [int(n) / 255 for n in colour.strip("rgb()").split(",")[:3]]
    linear = [
        c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels
    ]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one, other):
    a, b = sorted((luminance(one), luminance(other)), reverse=True)
    return (a + 0.05) / (b + 0.05)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_has_contrast_in_light_and_dark(show, report, scheme):
    opened = show(report, scheme=scheme)
    style = "(e, name) => getComputedStyle(e)[name]"
    back = opened.page.eval_on_selector("section", style, "backgroundColor")
    assert (luminance(back) < 0.2) == (scheme == "dark")
    for selector in (
        "h2",
        ".summary-text",
        "td",
        ".state.verified",
        ".mark.best",
        "summary",
    ):
        colour = opened.page.eval_on_selector(selector, style, "color")
        assert contrast(colour, back) >= 4.5, selector
    for name, least in (("soft", 4.5), ("bad", 4.5), ("behind", 3), ("blocked", 3)):
        drawn = opened.page.evaluate(
            """name => {
              document.body.style.color = `var(--${name})`;
              return getComputedStyle(document.body).color;
            }""",
            name,
        )
        assert contrast(drawn, back) >= least, name


def test_headline_figures_match_run(show, report):
    cards = {card["card"]: card for card in show(report).data("[data-card]")}
    assert int(cards["steps"]["value"]) == len(LASTS)
    assert int(cards["newest"]["value"]) == max(LASTS)
    assert float(cards["best"]["value"]) == min(LOSSES.values())
    assert int(cards["best"]["step"]) == 50
    files = {f.stat().st_ino: f.stat().st_size for f in _files(report.path)}
    assert int(cards["bytes"]["value"]) == sum(files.values())
    assert cards["integrity"]["value"] == "verified"
    assert float(cards["last-save"]["value"]) == report.saves[-1].blocked_secs


def _files(run):
    steps = [path for path in Path(run).iterdir() if path.name.isdigit()]
    return [file for step in steps for file in step.rglob("*") if file.is_file()]


def test_save_rows_match_seconds_in_journal(show, report):
    opened = show(report)
    sorted_by = """rows => rows.map(row => [row.dataset.step,
      ...[...row.querySelectorAll("td[data-v]")].slice(-2).map(each => each.dataset.v)
    ].map(Number))"""
    shown = opened.page.eval_on_selector_all("#steps tr[data-step]", sorted_by)
    rows = {step: secs for step, *secs in shown}
    for save in report.saves:
        wanted = [save.blocked_secs, save.total_secs]
        assert rows[save.step] == pytest.approx(wanted, rel=1e-8)
    saves = charts_of(_report.page(report))["saves"]
    assert saves["x"] == list(LOSSES)
    for name, wanted in (
        ("blocked", [save.blocked_secs for save in report.saves]),
        ("behind", [s.total_secs - s.blocked_secs for s in report.saves]),
    ):
        assert saves[name] == pytest.approx(wanted, rel=6e-3)  # three digits


def test_wide_page_fits_all_step_columns(show, report):
    names = ("eval/loss", "eval/accuracy", "train/loss", "learning_rate")
    steps = [
        dataclasses.replace(step, metrics=dict.fromkeys(names, 1 / 3))
        for step in report.steps
    ]
    history = [
        dataclasses.replace(saved, metrics=dict.fromkeys(names, 1 / 3))
        for saved in report.history
    ]
    many = dataclasses.replace(report, steps=tuple(steps), history=tuple(history))
    page = show(many, width=WIDEST).page
    hidden = page.eval_on_selector(
        "#steps .scroll", "each => each.scrollWidth - each.clientWidth"
    )
    assert hidden <= 0


def test_narrow_table_breaks_paths_after_slashes(show, report):
    path = "trunk/block_12/attention/out/kernel"
    leaf = next(iter(report.change.changed.values()))
    change = dataclasses.replace(report.change, changed={f"params/{path}": leaf})
    page = show(dataclasses.replace(report, change=change), width=360).page
    lines = page.eval_on_selector_all(
        "#change tr[data-path] th",
        """found => found.map(cell => {
          const range = document.createRange();
          let [text, top] = ["", null];
          const texts = document.createTreeWalker(cell, NodeFilter.SHOW_TEXT);
          for (let node; (node = texts.nextNode());) {
            for (let n = 0; n < node.length; n++) {
              range.setStart(node, n);
              range.setEnd(node, n + 1);
              const at = range.getBoundingClientRect().top;
              if (top !== null && at > top + 2) text += "\\n";
              top = at;
              text += node.data[n];
            }
          }
          return text;
        })""",
    )
    [line] = lines
    assert line.replace("\n", "") == path
    parts = line.split("\n")
    assert len(parts) > 1
    assert all(part.endswith("/") for part in parts[:-1]), line


def test_options_never_break_across_lines(show, report):
    unread = [
        check._replace(state="whole", bytes_checked=0) for check in report.integrity
    ]
    page = show(dataclasses.replace(report, integrity=tuple(unread))).page
    page.click("#integrity > details > summary")
    assert "--all" in page.inner_text("#integrity .command")
    for width in range(320, 1320, 40):
        page.set_viewport_size({"width": width, "height": 800})
        lines = page.evaluate(
            """() => {
              const code = document.querySelector('#integrity .command');
              const texts = document.createTreeWalker(code, NodeFilter.SHOW_TEXT);
              let text = texts.nextNode();
              while (!text.data.includes('--all')) text = texts.nextNode();
              const range = document.createRange();
              const start = text.data.indexOf('--all');
              range.setStart(text, start);
              range.setEnd(text, start + '--all'.length);
              return range.getClientRects().length;
            }"""
        )
        assert lines == 1, width


def test_charts_show_data_of_run(report):
    data = charts_of(_report.page(report))
    loss, accuracy = data["metrics"]
    assert dict(zip(loss["x"], loss["y"], strict=True)) == LOSSES
    assert (loss["name"], accuracy["name"]) == ("eval/loss", "eval/accuracy")
    states = {s: "k" if s in LASTS else "d" for s in LOSSES} | {50: "b"}
    assert dict(zip(loss["x"], loss["state"], strict=True)) == states
    steps = data["steps"]
    assert dict(zip(steps["x"], steps["state"], strict=True)) == states
    assert data["events"] == [], "nothing was saved after the restore"


def test_step_table_shows_reasons(show, report):
    opened = show(report)
    rows = {int(row["step"]): row for row in opened.data("#steps tr[data-why]")}
    assert {step: row["why"] for step, row in rows.items()} == {
        step.step: "; ".join(step.why) for step in report.steps
    }
    assert {int(row["step"]): int(row["bytes"]) for row in rows.values()} == {
        step.step: step.bytes for step in report.steps
    }
    deleted = opened.data("#steps tr[data-deleted]")
    assert {int(row["step"]) for row in deleted} == LOSSES.keys() - LASTS
    assert {row["deleted"] for row in deleted} == {"no policy keeps it"}


def test_parts_and_shares_match_sizes(show, report):
    opened = show(report)
    parts = opened.data("#sizes tr[data-bytes]")
    sizes = {part["part"]: int(part["bytes"]) for part in parts}
    assert [*sizes.values()] == sorted(sizes.values(), reverse=True)
    described = flaxckpt.metadata(report.path)
    assert {copy.path: copy.of for copy in report.copies} == {
        "opt_state/0/mu": "params",
        "opt_state/0/nu": "params",
    }
    copied = sum(copy.bytes for copy in report.copies)
    assert sum(sizes.values()) + copied == described.total_bytes == report.total_bytes
    kernel, head = "params/trunk/kernel", "params/head"
    assert (sizes[kernel], sizes[head]) == (32 * 16 * 4, 16 * 3 * 4)
    bars = opened.page.eval_on_selector_all(
        "#sizes tr .bar", "found => found.map(each => each.width.baseVal.value)"
    )
    wanted = [size / report.total_bytes for size in sizes.values()]
    assert [bar / max(bars) for bar in bars] == pytest.approx(
        [part / max(wanted) for part in wanted], abs=0.001
    )
    shares = opened.data("#sizes .share")
    assert sum(int(share["bytes"]) for share in shares) == report.total_bytes
    leaves = {leaf["path"] for leaf in opened.data("#sizes [data-leaf]")}
    copies = {copy.path for copy in report.copies}
    wanted = {p for p in described.leaves if p.rpartition("/")[0] not in copies}
    assert leaves >= {p for p in wanted if p.startswith("params/")} | copies
    assert not any(leaf.startswith(f"{c}/") for leaf in leaves for c in copies)


def test_changes_dataset_lineage_and_integrity_match_run(show, report):
    opened = show(report)
    truth = flaxckpt.diff(report.path, report.path, step_a=70, step_b=80).changed
    rows = opened.data("#change tr[data-path]")
    assert {row["path"] for row in rows} == set(truth)
    outermost = [row["path"].partition("/")[0] for row in rows]
    assert outermost == sorted(outermost, key=("params", "step", "opt_state").index)
    assert {row["path"]: float(row["rel"]) for row in rows} == {
        path: leaf.rel_norm for path, leaf in truth.items()
    }
    rows = opened.data("#dataset tr[data-step]")
    assert {int(row["step"]): row["values"] for row in rows} == {
        step: f"next_index={step}" for step in LASTS
    }
    [origin] = opened.data("#lineage li[data-path]")
    assert origin["path"] == report.lineage[0].path
    [row] = opened.data("#integrity tr[data-step]")
    assert (int(row["first"]), int(row["step"])) == (min(LASTS), max(LASTS))
    assert (row["state"], int(row["count"])) == ("verified", len(LASTS))
    assert int(row["bytes"]) == sum(c.bytes_checked for c in report.integrity)


def test_script_names_run_nothing(show, tmp_path):
    bad = "<script>document.title='run'</script>\"'>"
    worse = "<img src=x onerror=\"document.title='run'\">"
    with flaxckpt.Checkpointer(tmp_path / bad.replace("/", "|")) as run:
        for step in (1, 2, 3):
            state = {bad: {worse: jnp.full(3, step)}, worse: np.ones(2)}
            run.save(step, state, metrics={bad: step, worse: -step})
        directory = run.directory
    found = _report.gather(directory, _report.ReportOptions())
    opened = show(found)
    assert opened.messages == []
    assert opened.requests == [opened.page.url]
    assert opened.page.title().endswith("flaxckpt report")
    assert not found.faults
    assert len(opened.page.query_selector_all("script")) == 1
    assert opened.page.query_selector_all("img") == []
    assert opened.texts("figure[data-metric] strong")[:2] == [bad, worse]
    assert worse in opened.texts("#sizes .key")


def test_notebook_card_logs_nothing(browser, report, tmp_path):
    with flaxckpt.Checkpointer(report.path, keep=KEEP, read_only=True) as run:
        file = tmp_path / "card.html"
        page = f"<!doctype html><meta charset=utf-8>{run._repr_html_()}"
        file.write_text(page, encoding="utf-8")
    opened = Opened(browser, file, width=360)
    assert opened.messages == []
    assert [int(row["step"]) for row in opened.data("tr[data-step]")] == sorted(
        LASTS, reverse=True
    )
    assert opened.page.evaluate("document.documentElement.scrollWidth") <= 360
    opened.page.close()


def test_long_table_repeats_headings_on_printed_pages(browser, report, tmp_path):
    steps = (SavedStep(n, deleted=math.nan) for n in range(1000, 1200))
    many = dataclasses.replace(report, history=(*report.history, *steps))
    (tmp_path / "report.html").write_text(_report.page(many))
    page = browser.new_page(bypass_csp=True)
    page.goto((tmp_path / "report.html").as_uri())
    headed = pages_of_table(page, "#steps")
    assert len(headed) > 2
    assert all(headed)
    page.add_style_tag(
        content="@media print { thead { display: table-row-group !important } }"
    )
    assert pages_of_table(page, "#steps").count(True) == 1, "the test can fail"
    page.close()


A4_PX = 703
"""The width of a page without its margins."""


def test_printed_page_cuts_nothing_off(show, report):
    names = ("eval/loss", "eval/accuracy", "train/gradient_norm", "throughput")
    values = [*report.metrics.values()]
    metrics = {name: values[n % 2] for n, name in enumerate(names)}
    steps = tuple(
        dataclasses.replace(step, metrics=dict.fromkeys(names, -0.123456))
        for step in report.steps
    )
    report = dataclasses.replace(report, metrics=metrics, steps=steps)
    page = show(report, width=A4_PX).page
    page.emulate_media(media="print")
    beyond = page.evaluate(
        """() => [...document.querySelectorAll('table')].filter((table) => {
            const section = table.closest('section').getBoundingClientRect();
            return table.getBoundingClientRect().right > section.right - 12;
        }).map((table) => table.closest('section').id)"""
    )
    assert beyond == []
    boxes = page.eval_on_selector_all(
        ".scroll, .tree > ul",
        "found => found.map(box => box.scrollHeight - box.clientHeight)",
    )
    assert set(boxes) == {0}
    fades = "found => found.map(box => getComputedStyle(box, '::after').content)"
    assert set(page.eval_on_selector_all(".scroll", fades)) == {"none"}
    for hidden in ("nav", ".control"):
        assert not page.locator(hidden).first.is_visible()


ODD = {
    "no steps": [],
    "one step": [(5, {"loss": 1.0})],
    "no metrics": [(1, {}), (2, {})],
    "never finite": [(1, {"m": math.nan}), (2, {"m": math.inf})],
    "huge": [(10**12, {"m": 1e300}), (2 * 10**12, {"m": -1e300})],
    "constant": [(1, {"m": 0.0}), (2, {"m": 0.0})],
    "a long name": [(1, {"m" * 500: 1.0}), (2, {"m" * 500: 2.0})],
}


def test_unusual_runs_render_without_errors_and_fit(show, tmp_path):
    for name, rows in ODD.items():
        with flaxckpt.Checkpointer(tmp_path / name) as run:
            for step, metrics in rows:
                run.save(step, {"w": np.full(3, step)}, metrics=metrics)
        found = _report.gather(tmp_path / name, _report.ReportOptions())
        opened = show(found, width=390)
        for over in opened.page.query_selector_all("#recorder .u-over")[:1]:
            over.hover()
        assert opened.messages == [], name
        assert opened.page.evaluate("document.documentElement.scrollWidth") <= 390
        assert opened.texts(".verdict")[0], name
