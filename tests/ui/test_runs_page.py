"""All runs on a page in a real browser: colours, rankings, groups, search, links."""

import contextlib
import re
import shutil

import numpy as np
import pytest

import flaxckpt
from flaxckpt.policies import BestN, LatestN
from tests.helpers import legible
from tests.helpers.ui_server import serving
from tests.ui.test_browser import Page, browser, sync_api  # noqa: F401

expect = sync_api.expect
NAMES = [f"{kind}-{n}" for kind in ("adam", "sgd") for n in range(4)]


def save_run(root, name, loss):
    keep = [BestN(1, "loss", "min"), LatestN(9)]
    kind, _, number = name.partition("-")
    tags = {"optimizer": kind, "lr": int(number or 0) / 10, "fast": True, "list": [1]}
    with flaxckpt.Checkpointer(root / name, keep=keep, metadata=tags) as run:
        for step in (10, 20):
            metrics = {"loss": loss / step, "speed": step - loss}
            if name.startswith("sgd"):
                metrics["momentum"] = 0.9
            run.save(step, {"w": np.full(3, step)}, metrics=metrics)


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    for n, name in enumerate(NAMES):
        save_run(root, name, 1.0 + n)
    with serving(root) as server:
        server.root = root
        yield server


@contextlib.contextmanager
def open_page(browser, served):  # noqa: F811
    found = Page(browser, served)
    rows = found.page.locator("#all-runs tr[data-run]")
    expect(found.page.locator("#runs .message")).to_have_count(0)
    expect(rows.nth(len(NAMES) - 1)).to_be_visible()
    yield found
    assert found.is_quiet, found.messages
    found.context.close()


@pytest.fixture
def opened(browser, served):  # noqa: F811
    with open_page(browser, served) as found:
        yield found


@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_all_texts_and_targets_are_legible(browser, served, scheme, width):  # noqa: F811
    opened = Page(browser, served, width=width, scheme=scheme)
    page = opened.page
    hidden = page.locator("button[data-series='adam-1']")
    hidden.press("Enter")
    expect(hidden).to_have_attribute("aria-pressed", "false")
    expect(page.locator("#news")).to_have_text("up to date")
    page.evaluate("document.querySelector('#runs').classList.add('htmx-request')")
    found = page.evaluate(legible.FAINT), page.evaluate(legible.SMALL)
    assert found == ([], [])
    news, switch = (
        page.locator(which).bounding_box() for which in ("#news", "button.theme")
    )
    assert news["x"] + news["width"] <= switch["x"]
    middles = [box["y"] + box["height"] / 2 for box in (news, switch)]
    assert middles[0] == pytest.approx(middles[1], abs=3)
    assert opened.is_quiet, opened.messages
    opened.context.close()


def scroll_to(page, selector):
    page.locator(selector).scroll_into_view_if_needed()
    page.evaluate(  # events of scrolling come with the next frames
        "() => new Promise(done => requestAnimationFrame("
        "() => requestAnimationFrame(done)))"
    )


def order(opened):
    rows = "all => all.map(each => each.dataset.run)"
    return opened.page.locator("#all-runs tr[data-run]:visible").evaluate_all(rows)


def titles(opened):
    return opened.page.locator("#all-runs thead th").all_text_contents()


def test_ranks_runs_by_selected_metric(opened):
    assert order(opened)[: len(NAMES)] == NAMES
    opened.page.select_option("select[name=rank]", label="the best speed, lowest first")
    caption = opened.page.locator("#all-runs caption")
    expect(caption).to_have_text("By the best speed, lowest first")
    assert order(opened)[: len(NAMES)] == NAMES[::-1]
    best = opened.page.locator("tr[data-run='sgd-3'] td div").first
    assert best.text_content() == "2, step 10"
    assert "best speed" in titles(opened)
    opened.page.select_option("select[name=rank]", "")
    expect(caption).to_have_text("By the best loss, lowest first")


def test_verdict_and_table_come_before_curves(opened):
    verdict = opened.page.locator("#all-runs .verdict")
    expect(verdict).to_have_text(
        "Best adam-0: 0.05 at step 20 (loss); none of 8 diverged."
    )
    below = opened.page.locator("#all-runs table").bounding_box()
    curves = opened.page.locator("figure[data-metric=loss]").bounding_box()
    assert below["y"] + below["height"] < curves["y"]


def test_table_is_narrow_and_run_names_stay_whole(opened):
    opened.page.set_viewport_size({"width": 1000, "height": 800})
    box = opened.page.locator("#all-runs .scroll")
    assert box.evaluate("each => each.scrollWidth - each.clientWidth") <= 0
    opened.page.set_viewport_size({"width": 390, "height": 800})
    lines = """link => {
      link.textContent = "adam-lr0.03-batch-32-diverged";
      return link.getClientRects().length;
    }"""
    assert box.locator("tbody th a").first.evaluate(lines) == 1


def test_groups_runs_by_name_and_metrics(opened):
    opened.page.select_option("select[name=group]", "name")
    captions = opened.page.locator("#all-runs caption")
    expect(captions.nth(1)).to_contain_text("sgd: By the best loss")
    assert captions.first.text_content().startswith("adam: ")
    opened.page.select_option("select[name=group]", "metrics")
    expect(captions.nth(1)).to_contain_text("loss, speed, momentum: By")


def test_charts_have_mean_of_each_group_without_hidden_runs(opened):
    page = opened.page
    page.select_option("select[name=group]", "name")
    expect(page.locator("#all-runs caption")).to_have_count(2)
    over = page.locator("figure[data-metric=loss] .u-over")
    for hidden, said in (
        (None, "adam, mean of 4: 0.125\n"),  # of 1 to 4, by 20 steps
        ("adam-3", "adam, mean of 3: 0.1\n"),
    ):
        if hidden is not None:
            page.click(f"button[data-series='{hidden}']")
        scroll_to(page, "figure[data-metric=loss] .u-over")
        box = over.bounding_box()
        page.mouse.move(box["x"] + box["width"] - 2, box["y"] + box["height"] / 2)
        expect(page.locator(".tip")).to_contain_text(said)
    page.select_option("select[name=group]", "")
    expect(page.locator("#all-runs caption")).to_have_count(1)
    page.mouse.move(box["x"] + box["width"] - 9, box["y"] + box["height"] / 2)
    expect(page.locator(".tip")).not_to_contain_text("mean")


def test_search_finds_names_and_metrics_in_all_groups(opened):
    page = opened.page
    page.select_option("select[name=group]", "name")
    expect(page.locator("#all-runs caption").nth(1)).to_be_visible()
    page.fill("#all-runs [data-search]", "momentum")
    assert {name.partition("-")[0] for name in order(opened)} == {"sgd"}
    hidden = page.locator("button[data-series='adam-0']")
    assert hidden.get_attribute("aria-pressed") == "false"
    page.fill("#all-runs [data-search]", "adam")
    assert {name.partition("-")[0] for name in order(opened)} == {"adam"}
    page.fill("#all-runs [data-search]", "")


def test_groups_and_finds_runs_by_tags(opened):
    page = opened.page
    row = page.locator("tr[data-run='sgd-1']")
    expect(row.locator("td")).to_contain_text(["sgd", "0.1"])
    assert titles(opened)[1:5] == ["state", "best loss", "optimizer", "lr"]
    page.select_option("select[name=group]", label="lr")
    captions = page.locator("#all-runs caption")
    expect(captions.nth(3)).to_contain_text("lr=0.3: By the best loss")
    assert order(opened)[:4] == ["adam-0", "sgd-0", "adam-1", "sgd-1"]
    assert page.locator("select[name=group] option").all_text_contents() == [
        "nothing",
        "the start of the name",
        "the metrics",
        "optimizer",
        "lr",
    ]
    words = page.locator("#all-runs [data-search]")
    for search, found in {
        "lr=0.1": {"adam-1", "sgd-1"},
        "lr=0.2 optimizer=sgd": {"sgd-2"},
        "fast=true lr=0.3": {"adam-3", "sgd-3"},
        "r=0.3": set(),
    }.items():
        words.fill(search)
        assert {*order(opened)} == found, search


def test_link_keeps_ranking_group_and_search(browser, served):  # noqa: F811
    sender = Page(browser, served)
    page = sender.page
    page.select_option("select[name=rank]", label="the best speed, highest first")
    page.select_option("select[name=group]", "name")
    page.fill("#all-runs [data-search]", "sgd")
    expect(page).to_have_url(re.compile("#search=sgd&rank=max%3Aspeed&group=name$"))
    wanted = order(sender)
    assert wanted[:4] == NAMES[4:]
    reader = sender.context.new_page()
    reader.goto(page.url)
    rows = reader.locator("#all-runs tr[data-run]:visible")
    expect(rows).to_have_count(len(wanted))
    seen = rows.evaluate_all("all => all.map(each => each.dataset.run)")
    assert seen == wanted
    caption = reader.locator("#all-runs caption").last
    expect(caption).to_have_text("sgd: By the best speed, highest first")
    hidden = reader.locator("button[data-series='adam-0']")
    expect(hidden).to_have_attribute("aria-pressed", "false")
    page.select_option("select[name=group]", "")
    expect(page).to_have_url(re.compile("search=sgd&rank=max%3Aspeed$"))
    page.go_back()
    expect(page.locator("select[name=group]")).to_have_value("name")
    expect(page.locator("#all-runs caption")).to_have_count(2)
    assert sender.is_quiet, sender.messages
    sender.context.close()


def test_keys_open_run_of_curve(opened):
    page = opened.page
    over = page.locator("figure[data-metric=loss] .u-over")
    over.focus()
    over.press("End")
    for name in ("sgd-3", "sgd-2"):
        over.press("ArrowDown")
        expect(page.locator(".tip")).to_contain_text(f"{name}, step 20: ")
    over.press("ArrowUp")
    expect(page.locator(".tip")).to_contain_text("sgd-3, step 20: 0.4\nEnter opens it")
    over.press("Enter")
    page.wait_for_url("**/run?run=sgd-3")


def colours(opened):
    buttons = opened.page.locator("button[data-series]")
    seen = (
        "all => all.map(e => [e.dataset.series, e.style.getPropertyValue('--series')])"
    )
    return dict(buttons.evaluate_all(seen))


@pytest.fixture
def growing(browser, served, tmp_path):  # noqa: F811
    """The page of a copy of the runs, for a test that adds one."""
    root = shutil.copytree(served.root, tmp_path / "runs")
    with serving(root) as own:
        own.root = root
        with open_page(browser, own) as found:
            yield found


def test_run_keeps_its_colour_beside_new_runs(growing, browser):  # noqa: F811
    page = growing.page
    before = colours(growing)
    assert len(before) == len({*before.values()}) == 8
    swatch = page.locator("tr[data-run='sgd-3'] th")
    drawn = "each => getComputedStyle(each, '::before').backgroundColor"
    assert swatch.evaluate(drawn) != "rgba(0, 0, 0, 0)"
    page.select_option("select[name=rank]", label="the best speed, highest first")
    save_run(growing.served.root, "aaa", 30.0)
    expect(page.locator("button[data-series='aaa']")).to_be_visible()
    expect(page.locator("#all-runs caption")).to_contain_text("By the best speed")
    now = colours(growing)
    assert now.items() > before.items()
    page.reload()
    expect(page.locator("button[data-series='aaa']")).to_be_visible()
    expect(page.locator("#runs .message")).to_have_count(0)
    assert colours(growing) == now
    other = Page(browser, growing.served)  # another tab, which remembers no colours
    expect(other.page.locator("button[data-series='aaa']")).to_be_visible()
    expect(other.page.locator("#runs .message")).to_have_count(0)
    assert colours(other) == now
    other.context.close()


@pytest.mark.parametrize("width", [390, 1280])
def test_tip_ranks_runs_by_value_with_their_colours(browser, served, width):  # noqa: F811
    opened = Page(browser, served, width=width)
    page = opened.page
    expect(page.locator("#runs .message")).to_have_count(0)
    scroll_to(page, "figure[data-metric=loss] .u-over")
    page.hover("figure[data-metric=loss] .u-over", position={"x": 90, "y": 190})
    tip = page.locator(".tip")
    rows = re.findall(r"^([\w-]+): ([\d.]+)$", tip.text_content(), re.M)
    assert {*NAMES} <= {name for name, _ in rows}
    assert [float(value) for _, value in rows] == sorted(
        (float(value) for _, value in rows), reverse=True
    )
    background = "all => all.map(each => getComputedStyle(each).backgroundColor)"
    swatches = tip.locator(".swatch").evaluate_all(background)
    before = "each => getComputedStyle(each, '::before').backgroundColor"
    assert swatches == [
        page.locator(f"button[data-series='{name}']").evaluate(before)
        for name, _ in rows
    ]
    inner = tip.bounding_box()
    outer = page.locator("figure[data-metric=loss]").bounding_box()
    assert inner["x"] >= outer["x"] - 1
    assert inner["x"] + inner["width"] <= outer["x"] + outer["width"] + 1
    assert inner["y"] + inner["height"] <= outer["y"] + outer["height"] + 1
    assert opened.is_quiet, opened.messages
    opened.context.close()


def test_click_on_row_or_curve_opens_run(opened):
    page = opened.page
    page.locator("#all-runs tr[data-run='sgd-1'] td").nth(1).click()
    page.wait_for_url("**/run?run=sgd-1")
    page.go_back()
    over = page.locator("figure[data-metric=loss] .u-over")
    over.wait_for()
    expect(page.locator("#news")).to_have_text("up to date")  # nothing moves any more
    scroll_to(page, "figure[data-metric=loss] .u-over")
    box = over.bounding_box()
    page.mouse.move(box["x"] + 2, box["y"] + box["height"] / 2)
    expect(page.locator(".tip")).to_contain_text("loss, step 10")
    found = None
    for n in range(40):  # down the first step
        y = box["y"] + n / 40 * box["height"]
        page.mouse.move(box["x"] + 2, y)
        found = re.search(r"A click opens (\S+)", page.text_content(".tip"))
        if found:
            break
    page.mouse.click(box["x"] + 2, y)
    page.wait_for_url(f"**/run?run={found[1]}")


def test_pointer_reads_each_run_at_its_nearest_step_or_time(browser, tmp_path):  # noqa: F811
    for name, steps in (("tens", (10, 20, 30)), ("others", (12, 21, 29))):
        with flaxckpt.Checkpointer(tmp_path / name) as run:
            for step in steps:
                run.save(step, {"w": np.full(3, step)}, metrics={"loss": float(step)})
    with serving(tmp_path) as served:
        opened = Page(browser, served)
        page = opened.page
        expect(page.locator("#all-runs tr[data-run]")).to_have_count(2)
        curve = page.locator("figure[data-metric=loss] .u-over")
        tip = page.locator(".tip")
        curve.hover()
        expect(tip).to_contain_text("loss, step 20")
        expect(tip).to_contain_text("tens: 20")
        expect(tip).to_contain_text("others: 21 at step 21")
        page.mouse.move(1, 1)
        page.select_option("#metrics select", label="time")
        expect(page).to_have_url(re.compile("#axis=time$"))
        curve.hover(position={"x": 1, "y": 40})
        expect(tip).to_contain_text("loss, after 0 ms")
        expect(tip).to_contain_text("tens: 10 at step 10")
        expect(tip).to_contain_text("others: 12 at step 12")
        assert opened.is_quiet, opened.messages
        opened.context.close()
