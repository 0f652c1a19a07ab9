"""The script of the page in a real browser: values, log axes, sorting, search."""

import dataclasses
import math
import re

import numpy as np
import pytest

import flaxckpt
from flaxckpt import _report
from flaxckpt._inspect.history import SavedStep
from tests.helpers.report_runs import LASTS, LOSSES
from tests.report.test_browser import browser, report, show  # noqa: F401

LOSS = "figure[data-metric='eval/loss']"


def visible(opened, selector):
    return [
        each for each in opened.page.query_selector_all(selector) if each.is_visible()
    ]


def point_at(opened, selector, part, height=0.5):
    """Moves the pointer over an element, at parts of its width and height."""
    element = opened.page.query_selector(selector)
    element.scroll_into_view_if_needed()
    opened.page.evaluate(  # events of scrolling come with the next frames
        "() => new Promise(done => requestAnimationFrame("
        "() => requestAnimationFrame(done)))"
    )
    box = element.bounding_box()
    x, y = box["x"] + part * box["width"], box["y"] + height * box["height"]
    opened.page.mouse.move(x, y)


def tip(opened):
    found = opened.page.query_selector(".tip")
    return found.text_content() if found is not None and found.is_visible() else None


def test_the_policy_allows_only_the_script_and_the_style_of_the_page(show, report):  # noqa: F811
    opened = show(report)
    found = opened.page.evaluate(
        """() => {
            const script = document.createElement('script');
            script.textContent = 'window.injected = 1';
            document.body.append(script);
            document.body.insertAdjacentHTML('beforeend',
                '<p id=other style="color: red" onclick="window.clicked = 1">other</p>'
                + '<img src="http://127.0.0.1:9/x.png">');
            document.getElementById('other').click();
            return [window.injected, window.clicked,
                getComputedStyle(document.getElementById('other')).color];
        }"""
    )
    assert found[:2] == [None, None]
    assert found[2] != "rgb(255, 0, 0)"
    assert len([m for m in opened.messages if "Content Security Policy" in m]) >= 3


@pytest.mark.sampled(2)
@pytest.mark.parametrize("width", [360, 1280, 1920])
def test_the_pointer_shows_the_value_of_the_nearest_step_in_all_curves(
    show,  # noqa: F811
    report,  # noqa: F811
    width,
):
    opened = show(report, width=width)
    low, high = min(LOSSES), max(LOSSES)
    for step in (10, 30, 50, 80):
        point_at(opened, f"{LOSS} .plot", min(0.995, (step + 1 - low) / (high - low)))
        text = tip(opened)
        assert text.startswith(f"eval/loss\nstep {step}: {LOSSES[step]:.6g}"), text
        assert ("deleted since" in text) == (step not in LASTS)
        [other] = opened.texts("figure[data-metric='eval/accuracy'] output")
        assert other.startswith(f"step {step}: {1 - LOSSES[step] / 2:.6g}")
    opened.page.keyboard.press("Escape")
    assert tip(opened) is None
    assert opened.messages == []


def test_a_tap_shows_a_value(browser, report, tmp_path):  # noqa: F811
    file = tmp_path / "report.html"
    file.write_text(_report.page(report), encoding="utf-8")
    context = browser.new_context(
        viewport={"width": 390, "height": 800}, has_touch=True, is_mobile=True
    )
    page = context.new_page()
    page.goto(file.as_uri())
    page.locator(f"{LOSS} .plot").tap()
    assert re.match(r"eval/loss\nstep \d+: 0\.", page.text_content(".tip"))
    context.close()


def test_marks_of_other_pictures_show_their_texts(show, report):  # noqa: F811
    opened = show(report)
    point_at(opened, "#saves rect.behind[data-step='80']", 0.5)
    assert "step 80: written in the background" in tip(opened)
    point_at(opened, "#sizes .wide g[data-path='params/trunk/kernel']", 0.5)
    assert "2.05 kB" in tip(opened)
    point_at(opened, "#sizes .share[data-path='opt_state/0/mu']", 0.5)
    assert tip(opened).startswith("opt_state/0/mu: 2.3 kB")
    assert opened.page.query_selector("#sizes .wide g[data-path] > title") is not None


def test_arrow_keys_move_the_cursor(show, report):  # noqa: F811
    opened = show(report)
    opened.page.focus(f"{LOSS} .plot")
    seen = []
    for key in ("Home", "ArrowRight", "ArrowRight", "End", "ArrowLeft"):
        opened.page.keyboard.press(key)
        seen.append(int(opened.texts(f"{LOSS} output")[0].split(":")[0].split()[1]))
    assert seen == [10, 20, 30, 80, 70]


def test_the_log_axis_is_switched_on_and_off(show, report):  # noqa: F811
    opened = show(report)
    assert len(visible(opened, f"{LOSS} .linear")) == 2
    assert visible(opened, f"{LOSS} .log") == []
    opened.page.click(f"{LOSS} [data-action=log]")
    assert opened.page.get_attribute(f"{LOSS} [data-action=log]", "aria-pressed")
    assert visible(opened, f"{LOSS} .linear") == []
    places = opened.page.eval_on_selector_all(
        f"{LOSS} .log circle[data-value]",
        "found => found.map(e => [+e.dataset.value, e.cy.baseVal.value])",
    )
    logs, tops = np.log([v for v, _ in places]), np.array([y for _, y in places])
    slope, start = np.polyfit(logs, tops, 1)
    assert slope < 0
    np.testing.assert_allclose(slope * logs + start, tops, atol=0.1)
    point_at(opened, f"{LOSS} .plot", 0.99)
    cursor = opened.page.eval_on_selector(
        f"{LOSS} .cursor circle", "e => e.cy.baseVal.value"
    )
    assert cursor == pytest.approx(slope * np.log(LOSSES[80]) + start, abs=0.2)
    opened.page.click(f"{LOSS} [data-action=log]")
    assert visible(opened, f"{LOSS} .log") == []


def test_columns_are_sorted_by_their_values(show, report):  # noqa: F811
    opened = show(report)

    def steps():
        return [int(row["step"]) for row in opened.data("#steps tbody tr")]

    def click(name):
        opened.page.locator("#steps th button", has_text=name).first.click()

    assert steps() == sorted(LOSSES, reverse=True)
    assert opened.texts("#steps caption") == ["The newest first"]
    click("eval/loss")
    assert opened.texts("#steps caption") == ["By eval/loss, ascending"]
    assert steps() == sorted(LOSSES, key=LOSSES.get)
    click("eval/loss")
    assert steps() == sorted(LOSSES, key=LOSSES.get, reverse=True)
    click("durable in")
    secs = {save.step: save.total_secs for save in report.saves}
    assert steps() == sorted(LOSSES, key=secs.get)
    heads = opened.page.eval_on_selector_all(
        "#steps th[aria-sort]", "found => found.map(e => e.textContent)"
    )
    assert heads == ["durable in"]


def test_a_row_of_a_step_shows_it_in_the_curves(show, report):  # noqa: F811
    opened = show(report)
    point_at(opened, "#steps tbody tr[data-step='40'] th", 0.5)
    assert opened.texts(f"{LOSS} output") == ["step 40: 0.6, kept"]


def test_leaves_are_searched_and_folded(show, report):  # noqa: F811
    opened = show(report)

    def leaves():
        return [e.get_attribute("data-path") for e in visible(opened, "[data-leaf]")]

    assert "params/trunk/kernel" not in leaves()
    opened.page.fill("#sizes [data-search]", "Trunk kern")
    assert leaves() == ["params/trunk/kernel"]
    assert opened.texts("#sizes output.found")[0].startswith("1 of ")
    opened.page.fill("#sizes [data-search]", "")
    assert "params/trunk/kernel" not in leaves()
    assert "params/head" in leaves()
    opened.page.click("#sizes [data-action=unfold]")
    assert "params/trunk/kernel" in leaves()
    opened.page.click("#sizes [data-action=fold]")
    assert "params/head" not in leaves()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("width", [360, 390, 800, 1280, 1920])
def test_nothing_moves_while_values_are_read(show, report, width):  # noqa: F811
    page = show(report, width=width).page
    tops = """() => [...document.querySelectorAll('[data-metric] .plot, section')]
        .map(each => each.getBoundingClientRect().top + scrollY)"""
    before = page.evaluate(tops)
    page.hover(f"{LOSS} .plot", position={"x": 60, "y": 80})
    [reading] = page.locator(f"{LOSS} output").all_text_contents()
    assert reading.startswith("step ")
    assert page.locator(f"{LOSS} .facts").is_hidden()
    assert page.evaluate(tops) == before
    page.mouse.move(1, 1)
    assert page.locator(f"{LOSS} .facts").is_visible()


def test_rows_of_a_long_table_are_searched(show, report):  # noqa: F811
    step = report.history[-1]
    many = tuple(dataclasses.replace(step, step=n) for n in range(300))
    opened = show(dataclasses.replace(report, history=many))
    opened.page.fill("#steps [data-search]", "299")
    assert [row["step"] for row in opened.data("#steps tbody tr:not([hidden])")] == [
        "299"
    ]


@pytest.mark.parametrize("width", [390, 1280])
def test_a_long_table_shows_that_it_has_more_rows(show, report, width):  # noqa: F811
    many = tuple(SavedStep(n, deleted=math.nan, reason="x") for n in range(40))
    opened = show(dataclasses.replace(report, history=many, steps=()), width=width)
    box = opened.page.locator("#steps .scroll")
    sizes = "box => [box.scrollHeight, box.clientHeight]"
    whole, shown = box.evaluate(sizes)
    assert whole > 2 * shown
    fade = "box => getComputedStyle(box, '::after').backgroundImage"
    assert "gradient" in box.evaluate(fade)
    button = opened.page.locator("#steps button", has_text="Show all 40 rows")
    button.click()
    assert button.get_attribute("aria-pressed") == "true"
    whole, shown = box.evaluate(sizes)
    assert whole == shown
    button.click()
    assert box.evaluate(sizes)[1] < whole
    assert opened.messages == []


def test_a_short_table_has_no_button(show, report):  # noqa: F811
    page = show(report).page
    assert page.locator("#steps tbody tr").count() == len(LOSSES)
    assert page.locator("[data-action=expand]").count() == 0
    sizes = "box => [box.scrollHeight, box.clientHeight]"
    whole, shown = page.locator("#steps .scroll").evaluate(sizes)
    assert whole == shown


def test_a_search_finds_whole_numbers_and_no_folded_texts(show, report):  # noqa: F811
    many = tuple(
        SavedStep(n, deleted=math.nan, reason="no policy keeps it")
        for n in range(0, 1100, 10)
    )
    opened = show(dataclasses.replace(report, history=many, steps=()))

    def found(text):
        opened.page.fill("#steps [data-search]", text)
        rows = opened.data("#steps tbody tr:not([hidden])")
        return [int(row["step"]) for row in rows]

    assert found("100") == [100]
    assert found("20") == [20]
    assert found("LatestN") == []
    found("")
    opened.page.click("#steps tr[data-step='30'] summary")
    assert found("20") == [30, 20]
    assert found("LatestN(3)") == [30]
    assert opened.messages == []


def test_sections_fold_and_links_unfold_them(show, report):  # noqa: F811
    opened = show(report)
    opened.page.click("#saves > details > summary")
    assert visible(opened, "#saves .plot") == []
    opened.page.click("nav a[href='#saves']")
    assert visible(opened, "#saves .plot") != []


def test_the_card_of_the_best_step_leads_to_its_row(show, report):  # noqa: F811
    opened = show(report)
    opened.page.click("#steps > details > summary")
    assert visible(opened, "#step-50") == []
    opened.page.click("[data-card=best]")
    [row] = visible(opened, "#step-50")
    assert row.get_attribute("data-step") == "50"
    top = row.bounding_box()["y"]
    assert 0 <= top < opened.page.viewport_size["height"]
    assert opened.page.query_selector("tr:target") is not None


def test_fragments_that_are_inserted_later_are_alive(show, report):  # noqa: F811
    opened = show(report)
    opened.page.evaluate(
        """() => {
            const copy = document.querySelector('#steps').outerHTML;
            document.querySelector('#steps').outerHTML = copy;
            const figure = document.querySelector('#metrics figure').outerHTML;
            document.querySelector('#metrics').outerHTML =
                `<section id=metrics>${figure}</section>`;
        }"""
    )
    opened.page.locator("#steps th button", has_text="eval/loss").click()
    assert int(opened.data("#steps tbody tr")[0]["step"]) == 50
    point_at(opened, "#metrics .plot", 0.001)
    assert tip(opened).startswith("eval/loss\nstep 10: 0.9")
    assert opened.messages == []


def test_without_script_everything_is_there(browser, report, tmp_path):  # noqa: F811
    file = tmp_path / "report.html"
    file.write_text(_report.page(report), encoding="utf-8")
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(file.as_uri())
    assert page.locator("section").count() == 8
    for text in ("no policy keeps it", "params/trunk/kernel", "next_index"):
        assert text in page.content()
    assert page.locator("#steps tbody tr").count() == len(LOSSES)
    assert page.locator("#steps tbody tr >> nth=0").is_visible()
    assert page.locator(f"{LOSS} .linear polyline").first.is_visible()
    assert not page.locator("input, [data-action]").first.is_visible()
    context.close()


def test_hostile_names_stay_text_in_tips(show, tmp_path):  # noqa: F811
    bad = "<img src=x onerror=document.title=1>"
    with flaxckpt.Checkpointer(tmp_path / "run") as run:
        for step in (1, 2, 3):
            state = {bad: {"a": np.full(4, step, np.float32)}, "b": np.ones(2)}
            run.save(step, state, metrics={bad: float(step)}).wait()
    opened = show(_report.gather(tmp_path / "run", _report.ReportOptions()))
    point_at(opened, "#metrics .plot", 0.001)
    assert tip(opened).startswith(f"{bad}\nstep 1: 1")
    point_at(opened, f'#sizes .share[data-path="{bad}"]', 0.5)
    assert tip(opened).startswith(bad)
    opened.page.fill("#sizes [data-search]", "<img")
    assert opened.page.query_selector("img") is None
    assert opened.messages == []


def test_one_curve_of_many_values_is_pointed_at_exactly(show, report):  # noqa: F811
    rng = np.random.default_rng(0)
    first = report.metrics["eval/loss"][0]
    values = tuple(
        first._replace(step=100 * n, value=float(rng.normal()), best=None)
        for n in range(1000)
    )
    opened = show(dataclasses.replace(report, metrics={"m": values}))
    for n in (0, 123, 500, 998):
        point_at(opened, "figure[data-metric=m] .plot", max(n / 999, 1e-4))
        assert f"step {100 * n:,}: {values[n].value:.6g}" in tip(opened)


def test_the_script_is_small_and_plain():
    script = _report.assets.script()
    assert len(script.encode()) < 20_000
    banned = r"innerHTML|outerHTML|insertAdjacent|eval\(|Function\(|fetch\(|XMLHttp"
    assert re.search(banned, script) is None
