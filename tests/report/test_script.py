"""The script of the page in a real browser: values, log axes, sorting, search."""

import dataclasses
import math
import re
import shutil

import numpy as np
import pytest

import flaxckpt
from flaxckpt import _report
from flaxckpt._inspect.history import SavedStep
from tests.helpers.report_runs import LASTS, LOSSES
from tests.report.test_browser import browser, report, show, sync_api  # noqa: F401

expect = sync_api.expect

LOSS = "figure[data-metric='eval/loss']"


def visible(opened, selector):
    # Locators, as a page that is drawn again replaces elements.
    return opened.page.locator(selector).locator("visible=true").all()


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


def unfold(opened, section):
    opened.page.click(f"#{section} > details > summary")


def test_csp_allows_only_own_script_and_style(show, report):  # noqa: F811
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


def point_at_step(opened, step, metric="eval/loss"):
    """Moves the pointer to the place of a step in a curve; returns the tip."""
    low, high = min(LOSSES), max(LOSSES)
    part = (step - low) / (high - low)
    point_at(opened, f"figure[data-metric='{metric}'] .u-over", min(part, 0.999))
    return tip(opened)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("width", [360, 1280, 1920])
def test_pointer_shows_value_of_nearest_step_in_all_curves(
    show,  # noqa: F811
    report,  # noqa: F811
    width,
):
    opened = show(report, width=width)
    for step in (10, 30, 50, 80):
        text = point_at_step(opened, step)
        assert text.startswith(f"eval/loss\nstep {step}: {LOSSES[step]:.6g}"), text
        why = "deleted since: no policy keeps it"
        assert (why in text) == (step not in LASTS)
        [other] = opened.texts("figure[data-metric='eval/accuracy'] output")
        assert other.startswith(f"step {step}: {1 - LOSSES[step] / 2:.6g}")
    opened.page.keyboard.press("Escape")
    assert tip(opened) is None
    assert opened.messages == []


def test_tap_shows_value(browser, report, tmp_path):  # noqa: F811
    file = tmp_path / "report.html"
    file.write_text(_report.page(report), encoding="utf-8")
    context = browser.new_context(
        viewport={"width": 390, "height": 800}, has_touch=True, is_mobile=True
    )
    page = context.new_page()
    page.goto(file.as_uri())
    page.locator(f"{LOSS} .u-over").tap()
    assert re.match(r"eval/loss\nstep \d+: 0\.", page.text_content(".tip"))
    context.close()


def test_marks_of_other_charts_show_their_texts(show, report):  # noqa: F811
    opened = show(report)
    width = opened.page.eval_on_selector("canvas.lanes", "each => each.clientWidth")
    last = 1 - 19 / width  # the margin at the right, and a pixel
    point_at(opened, "canvas.lanes", last, height=0.2)
    assert tip(opened) == "step 80: kept"
    point_at(opened, "canvas.lanes", last, height=0.85)
    assert tip(opened).startswith("step 80: training waited ")
    first = 63 / width  # the axis at the left
    point_at(opened, "canvas.lanes", first, height=0.2)
    assert tip(opened) == "step 10: deleted since: no policy keeps it"
    assert opened.texts(f"{LOSS} output")[0].startswith("step 10: ")
    unfold(opened, "sizes")
    point_at(opened, "#sizes .share[data-path='opt_state/0/mu']", 0.5)
    assert tip(opened).startswith("opt_state/0/mu: 2.3 kB")


def test_arrow_keys_move_cursor(show, report):  # noqa: F811
    opened = show(report)
    opened.page.focus(f"{LOSS} .u-over")
    seen = []
    for key in ("Home", "ArrowRight", "ArrowRight", "End", "ArrowLeft"):
        opened.page.keyboard.press(key)
        seen.append(int(opened.texts(f"{LOSS} output")[0].split(":")[0].split()[1]))
    assert seen == [10, 20, 30, 80, 70]
    opened.page.keyboard.press("Enter")
    assert opened.texts("menu.actions .chosen") == ["Step 70"]


def shown_steps(opened):
    """Returns the steps of the rows that are shown, and what the page says of them."""
    rows = visible(opened, "#steps tbody tr")
    said = opened.texts("output.range")[0]
    return {int(row.get_attribute("data-step")) for row in rows}, said


def test_selected_step_range_applies_everywhere(show, report):  # noqa: F811
    opened = show(report)
    mouse = opened.page.mouse
    box = opened.page.locator(f"{LOSS} .u-over").bounding_box()
    middle = box["y"] + box["height"] / 2
    mouse.move(box["x"] + 0.4 * box["width"], middle)  # 38
    mouse.down()
    mouse.move(box["x"] + 0.8 * box["width"], middle, steps=4)  # 66
    mouse.up()
    assert shown_steps(opened) == ({40, 50, 60, 70}, "steps 40 to 70")
    opened.page.focus("canvas.brush")
    opened.page.keyboard.press("ArrowRight")
    assert shown_steps(opened) == ({50, 60, 70, 80}, "steps 50 to 80")
    opened.page.click("[data-action=all-steps]")
    assert shown_steps(opened) == ({*LOSSES}, "all steps")
    box = opened.page.locator("canvas.brush").bounding_box()
    mouse.move(box["x"] + 62, box["y"] + 9)
    mouse.down()
    mouse.move(box["x"] + 0.5 * box["width"], box["y"] + 9, steps=4)
    mouse.up()
    assert shown_steps(opened) == ({10, 20, 30, 40}, "steps 10 to 40")
    opened.page.keyboard.press("Escape")
    assert shown_steps(opened)[1] == "all steps"
    assert opened.messages == []


def drag(opened, selector, start, end):
    """Drags over an element from a part of its width to another."""
    element = opened.page.locator(selector)
    element.scroll_into_view_if_needed()
    box = element.bounding_box()
    middle = box["y"] + box["height"] / 2
    opened.page.mouse.move(box["x"] + start * box["width"], middle)
    opened.page.mouse.down()
    opened.page.mouse.move(box["x"] + end * box["width"], middle, steps=4)
    opened.page.mouse.up()


def test_zoom_clears_reading_of_previous_step(show, report):  # noqa: F811
    opened = show(report)
    drag(opened, f"{LOSS} .u-over", 0.4, 0.8)
    assert shown_steps(opened)[1] == "steps 40 to 70"
    assert tip(opened) is None
    assert opened.texts("[data-metric] output") == ["", "", ""]
    point_at(opened, f"{LOSS} .u-over", 0.98)
    assert tip(opened).startswith("eval/loss\nstep 70: ")
    assert all(t.startswith("step 70: ") for t in opened.texts("[data-metric] output"))
    opened.page.focus(f"{LOSS} .u-over")
    opened.page.keyboard.press("Home")
    opened.page.keyboard.press("Escape")
    assert opened.texts(f"{LOSS} output")[0].startswith("step 40: "), (
        "it is shown still"
    )
    assert opened.texts("menu.actions .chosen") == ["Step 80"]
    assert opened.messages == []


def test_url_reflects_selection(show, report):  # noqa: F811
    opened = show(report)
    page, start = opened.page, opened.page.url
    drag(opened, f"{LOSS} .u-over", 0.4, 0.8)
    expect(page).to_have_url(f"{start}#steps=40-70")
    page.click("#steps tr[data-step='50'] th")
    expect(page).to_have_url(f"{start}#steps=40-70&step=50")
    page.go_back()
    shown = page.locator("output.range").first
    chosen = page.locator("menu.actions .chosen")
    expect(chosen).to_have_text("Step 80")
    expect(shown).to_have_text("steps 40 to 70")
    page.go_back()
    expect(shown).to_have_text("all steps")
    page.go_forward()
    page.go_forward()
    expect(shown).to_have_text("steps 40 to 70")
    expect(chosen).to_have_text("Step 50")
    page.click("nav a[href='#saves']")
    expect(shown).to_have_text("steps 40 to 70")
    assert opened.messages == []


@pytest.mark.parametrize(
    ("fragment", "shown", "chosen"),
    [
        ("#steps=40-70&step=50", "steps 40 to 70", "Step 50"),
        ("#step=30", "all steps", "Step 30, deleted"),
        ("#steps=41-69", "steps 40 to 70", "Step 80"),
        ("#steps=70-40&step=7", "steps 40 to 70", "Step 7, not in this run"),
        ("#steps=0-9999999999999999999999", "all steps", "Step 80"),
        ("#steps=a-b", "all steps", "Step 80"),
    ],
)
def test_link_opens_selected_step_range(
    show,  # noqa: F811
    report,  # noqa: F811
    fragment,
    shown,
    chosen,
):
    opened = show(report)
    opened.page.goto("about:blank")
    opened.page.goto(f"{opened.requests[0]}{fragment}")
    expect(opened.page.locator("output.range").first).to_have_text(shown)
    expect(opened.page.locator("menu.actions .chosen")).to_have_text(chosen)
    assert opened.messages == []


def pixels(opened, selector):
    return opened.page.eval_on_selector(selector, "each => each.toDataURL()")


def test_log_axis_and_smoothing_redraw_curve(show, report):  # noqa: F811
    opened = show(report)
    canvas = f"{LOSS} canvas"
    seen = [pixels(opened, canvas)]
    log = opened.page.locator(f"{LOSS} [data-action=log-axis]")
    log.click()
    assert log.get_attribute("aria-pressed") == "true"
    seen.append(pixels(opened, canvas))
    log.click()
    assert pixels(opened, canvas) == seen[0]
    opened.page.fill("input[data-smooth]", "0.9")
    seen.append(pixels(opened, canvas))
    assert len({*seen}) == 3
    assert opened.messages == []


def test_widely_spread_values_start_on_log_axis(show, tmp_path):  # noqa: F811
    with flaxckpt.Checkpointer(tmp_path / "run") as run:
        for step in range(1, 9):
            metrics = {"loss": 400 / 50**step + 1, "score": 1 / step}
            run.save(step, {"w": np.ones(2)}, metrics=metrics)
    opened = show(_report.gather(tmp_path / "run", _report.ReportOptions()))
    buttons = "[data-action=log-axis]"
    pressed = opened.page.locator(buttons).all()
    states = {button.get_attribute("aria-pressed") for button in pressed}
    assert states == {"false"}, "9 times the median is not wide"
    with flaxckpt.Checkpointer(tmp_path / "run") as run:
        run.save(9, {"w": np.ones(2)}, metrics={"loss": 5000, "score": 1 / 9})
    opened = show(_report.gather(tmp_path / "run", _report.ReportOptions()))
    log = opened.page.locator(buttons).first
    assert log.get_attribute("aria-pressed") == "true"
    wide = pixels(opened, "[data-metric=loss] canvas")
    log.click()
    assert log.get_attribute("aria-pressed") == "false"
    assert pixels(opened, "[data-metric=loss] canvas") != wide


def test_actions_apply_to_chosen_step(show, report, tmp_path):  # noqa: F811
    opened = show(report)
    opened.page.context.grant_permissions(["clipboard-read", "clipboard-write"])

    def copy(name):
        opened.page.click(f"menu.actions button:text-is('{name}')")
        opened.page.wait_for_selector("menu.actions output:not(:empty)")
        return opened.page.evaluate("navigator.clipboard.readText()")

    assert opened.texts("menu.actions .chosen") == ["Step 80"]
    place = opened.page.locator(f"{LOSS} .plot").bounding_box()
    assert copy("Compare") == f"flaxckpt diff {report.path} 70 80"
    assert opened.page.locator(f"{LOSS} .plot").bounding_box() == place
    opened.page.click("#steps tr[data-step='50'] th")
    assert opened.texts("menu.actions .chosen") == ["Step 50"]
    resume = "Resume from here, deleting 3 newer steps"
    code = copy(resume)
    opened.page.hover(f"menu.actions button:text-is('{resume}')")
    assert tip(opened) == code
    assert "if step > 50:  # deletes 60, 70, 80\n" in code
    copied = tmp_path / "run"
    shutil.copytree(report.path, copied)
    code = code.replace(repr(str(report.path)), repr(str(copied)))
    exec(code, {})
    assert flaxckpt.Checkpointer(copied).latest_step() == 50
    assert int(flaxckpt.Checkpointer(copied).restore().step) == 50
    assert "source_step=50" in copy("Fine-tune from here")
    assert copy("Compare") == f"flaxckpt diff {report.path} 50 80"
    opened.page.click("#steps tr[data-step='30'] th")
    assert opened.texts("menu.actions .chosen") == ["Step 30, deleted"]
    usable = opened.page.locator("menu.actions button:enabled")
    assert usable.all_text_contents() == ["Report as one file"]


def test_keys_show_tips_of_buttons_and_code_as_code(show, report):  # noqa: F811
    opened = show(report)
    opened.page.locator("menu.actions button").first.focus()
    opened.page.keyboard.press("Tab")
    assert "restore_or_init(state" in tip(opened)
    shown, button = (
        opened.page.locator(which).bounding_box() for which in (".tip", ":focus")
    )
    assert shown["y"] >= button["y"] + button["height"], "it hides no button"
    font = "each => getComputedStyle(each).fontFamily"
    assert "monospace" in opened.page.locator(".tip").evaluate(font)
    opened.page.locator("[data-smooth]").focus()
    assert tip(opened) is None
    opened.page.hover("#steps tr[data-step='50'] th")
    point_at(opened, f"{LOSS} .u-over", 0.5)
    assert "monospace" not in opened.page.locator(".tip").evaluate(font)
    assert opened.messages == []


def test_line_of_pointer_is_at_step(show, report):  # noqa: F811
    opened = show(report)
    places = set()
    for part in (0.46, 0.47, 0.48):  # between steps 40 and 50
        point_at(opened, f"{LOSS} .u-over", part)
        line = opened.page.locator(f"{LOSS} .u-cursor-x").bounding_box()
        over = opened.page.locator(f"{LOSS} .u-over").bounding_box()
        places.add(round((line["x"] - over["x"]) / over["width"], 2))
    assert places == {round(3 / 7, 2)}
    assert opened.messages == []


def test_offers_no_restore_of_steps_that_are_not_finite(show, diverged):  # noqa: F811
    opened = show(diverged)
    opened.page.click("#steps tr[data-step='60'] th")
    assert opened.texts("menu.actions .chosen") == ["Step 60, not finite"]
    usable = opened.page.locator("menu.actions button:enabled").all_text_contents()
    assert usable == ["Compare", "Export", "Report as one file"]
    assert opened.messages == []


def test_legends_name_all_signs_and_lines(show, report):  # noqa: F811
    opened = show(report)
    key = opened.texts("[data-draw=track] .legend li")
    assert key[:3] == ["●the best", "●kept", "●deleted since"]
    longest = max(save.blocked_secs for save in report.saves)
    assert len(key) == 4
    waited = re.fullmatch(r"▮training waited, ([\d.]+) (ms|s) at most", key[3])
    unit = {"ms": 1e-3, "s": 1}[waited[2]]
    assert float(waited[1]) * unit == pytest.approx(longest, rel=0.01)
    assert opened.texts("[data-draw=saves] .legend li") == [
        "training waited",
        "written in the background",
    ]
    lines = opened.page.locator("[data-draw=saves] .swatch")
    drawn = "all => all.map(each => getComputedStyle(each).backgroundColor)"
    assert len(set(lines.evaluate_all(drawn))) == 2


def test_legend_lists_only_events_of_run(show, diverged):  # noqa: F811
    opened = show(diverged)
    key = opened.texts("[data-draw=track] .legend li")
    assert "‼not finite from here on" in key
    assert not any(sign in "".join(key) for sign in "▲■◆▼△")


def test_keyboard_navigates_lanes(show, report):  # noqa: F811
    opened = show(report)
    lanes = opened.page.locator("canvas.lanes")
    lanes.press("Home")
    assert tip(opened) == "step 10: deleted since: no policy keeps it"
    assert lanes.get_attribute("aria-valuetext") == tip(opened)
    lanes.press("ArrowRight")
    assert tip(opened).startswith("step 10: training waited ")
    lanes.press("ArrowRight")
    assert tip(opened).startswith("step 20: ")
    assert opened.texts(f"{LOSS} output")[0].startswith("step 20: ")
    lanes.press("Enter")
    assert opened.texts("menu.actions .chosen") == ["Step 20"]
    assert opened.messages == []


@pytest.fixture(scope="module")
def diverged(tmp_path_factory):
    """The report of a run whose layer `b` grows, and is NaN from step 40 on."""
    root = tmp_path_factory.mktemp("diverged") / "run"
    keep = [flaxckpt.policies.BestN(1, "loss", "min"), flaxckpt.policies.LatestN(2)]
    with flaxckpt.Checkpointer(root, keep=keep) as run:
        on_step = flaxckpt.CheckpointCallback(
            run, every_steps=10, statistics=True, check_step=False
        )
        for step in range(10, 70, 10):
            grown = np.nan if step >= 40 else 10.0**step
            layers = {
                "a": {"w": np.full(8, 1 + step / 1e4)},
                "b": {"w": grown * np.ones(8)},
            }
            loss = np.nan if step >= 40 else 1 / step
            on_step(step, {"params": layers}, metrics={"loss": loss})
    return _report.gather(root, _report.ReportOptions())


def test_diverged_run_shows_where_and_how_to_continue(show, diverged):  # noqa: F811
    opened = show(diverged)
    [verdict] = opened.texts(".verdict")
    text = (
        "Diverged at 40: NaN since; last finite step 30 is kept; params/b jumped first"
    )
    assert verdict.startswith(f"{text}, at 20")
    assert opened.texts("menu.actions .chosen") == ["Step 30"]
    assert opened.messages == []


def test_shows_and_unfolds_layer_diverging_first(show, diverged):  # noqa: F811
    opened = show(diverged)
    assert opened.texts(".layer") == ["a", "b"], "all others begin the same"
    axis = opened.page.locator(".drawn.layers > canvas")
    assert axis.get_attribute("aria-label") == "Steps"
    # A cell lies around the place where the track has its step.
    point_at(opened, "[data-layer='params/b'] canvas", 0.22)
    assert tip(opened).startswith("params/b, step 20\n")
    opened.page.hover("tr[data-step='60']")
    line = "getComputedStyle(document.querySelector('.heat'), '::after').left"
    width = opened.page.locator(".heat").bounding_box()["width"]
    assert float(opened.page.evaluate(line)[:-2]) == pytest.approx(width - 18, abs=1)
    point_at(opened, "[data-layer='params/b'] canvas", 0.4)
    assert tip(opened).startswith("params/b, step 30\nthe norm changed by 1000 % or")
    point_at(opened, "[data-layer='params/b'] canvas", 0.6)
    assert tip(opened) == "params/b, step 40\nnot finite"
    point_at(opened, "[data-layer='params/a'] canvas", 0.6)
    assert "changed by 0.11 % since" in tip(opened)
    # Locators wait: a page that grows draws the histograms again.
    leaf = opened.page.locator(".ridges figcaption:visible")
    assert leaf.count() == 0
    opened.page.click("[data-layer='params/b'] canvas")
    leaf.wait_for()
    assert leaf.all_text_contents() == ["params/b/w"]
    layer = opened.page.locator("[data-layer='params/b'] button")
    assert layer.get_attribute("aria-expanded") == "true"
    layer.press("Enter")
    leaf.wait_for(state="hidden")
    assert opened.messages == []


def test_histograms_before_blow_up_stay_wide(show, tmp_path):  # noqa: F811
    values = np.linspace(-1.0, 1.0, 64)
    with flaxckpt.Checkpointer(tmp_path / "run") as run:
        on_step = flaxckpt.CheckpointCallback(
            run, every_steps=1, statistics=True, check_step=False
        )
        for step, factor in enumerate([1.0, 1.1, 1e4], 1):
            layers = {"even": {"w": values * step}, "grown": {"w": values * factor}}
            on_step(step, {"params": layers})
    opened = show(_report.gather(tmp_path / "run", _report.ReportOptions()))
    for layer, word in (("even", "One axis for all steps"), ("grown", "logarithmic")):
        row = f"[data-layer='params/{layer}']"
        opened.page.click(f"{row} > canvas")
        canvas = opened.page.locator(f"{row} figure canvas")
        assert word in canvas.get_attribute("data-tip")
        # Where the first histogram has its base: how much of the width it takes.
        painted = canvas.evaluate(
            """(canvas) => {
                const y = 33 * devicePixelRatio;
                const { data } = canvas.getContext("2d")
                    .getImageData(0, y, canvas.width, 1);
                let count = 0;
                for (let n = 3; n < data.length; n += 4) count += data[n] > 0;
                return count / canvas.width;
            }"""
        )
        assert painted > 0.1, layer
    assert opened.messages == []


LONG_LAYERS = [f"transformer_encoder_block_{n}" for n in range(3)]


@pytest.fixture(scope="module")
def long_run(tmp_path_factory):
    """The report of a run with layers of long names, at steps 5,000 to 20,000."""
    root = tmp_path_factory.mktemp("long") / "run"
    with flaxckpt.Checkpointer(root) as run:
        on_step = flaxckpt.CheckpointCallback(
            run, every_steps=5000, statistics=True, check_step=False
        )
        for step in range(5000, 25000, 5000):
            layers = {name: {"w": np.full(4, float(step))} for name in LONG_LAYERS}
            metrics = {"rate": step / 2e7}
            on_step(step, {"params": layers}, metrics=metrics)
    return _report.gather(root, _report.ReportOptions())


@pytest.mark.parametrize("width", [390, 1280])
def test_names_of_layers_are_beside_cells(show, long_run, width):  # noqa: F811
    opened = show(long_run, width=width)
    assert opened.texts(".layer") == LONG_LAYERS
    first = """canvas => {
        const row = canvas.getContext('2d').getImageData(0, 9, canvas.width, 1).data;
        return row.findIndex((part, n) => n % 4 === 3 && part > 0) / 4;
    }"""
    for layer in opened.page.locator("[data-layer]").all():
        name, cells = layer.locator("button"), layer.locator("canvas").first
        box = name.bounding_box()
        begin = cells.bounding_box()["x"] + cells.evaluate(first)
        assert box["x"] + box["width"] <= begin


def test_axes_have_one_unit(browser, long_run, tmp_path):  # noqa: F811
    file = tmp_path / "report.html"
    file.write_text(_report.page(long_run), encoding="utf-8")
    page = browser.new_page()
    page.add_init_script(
        """window.drawn = [];
        const draw = CanvasRenderingContext2D.prototype.fillText;
        CanvasRenderingContext2D.prototype.fillText = function (text, ...given) {
            window.drawn.push(text);
            draw.call(this, text, ...given);
        };"""
    )
    page.goto(file.as_uri())
    texts = set(page.evaluate("drawn"))
    assert {"5k", "10k", "20k", "0.0006", "0.001"} <= texts
    assert not {"5,000", "6e-4"} & texts
    page.close()


def test_time_axis_widens_outage(show, report):  # noqa: F811
    saved = {step: step + 600 * (step > 50) for step in LOSSES}
    history = tuple(
        dataclasses.replace(each, saved=saved[each.step]) for each in report.history
    )
    opened = show(dataclasses.replace(report, history=history))
    page = opened.page
    point_at(opened, f"{LOSS} .u-over", 0.5)
    assert "\nstep 40: " in tip(opened) or "\nstep 50: " in tip(opened)
    lanes = pixels(opened, "canvas.lanes")
    page.select_option(".tools select", label="time")
    expect(page).to_have_url(re.compile("#axis=time$"))
    assert pixels(opened, "canvas.lanes") != lanes
    for part, step in ((0.0, 10), (0.4, 50), (0.6, 60), (0.999, 80)):
        point_at(opened, f"{LOSS} .u-over", part)
        assert f"\nstep {step}: {LOSSES[step]}" in tip(opened), part
    drag(opened, f"{LOSS} .u-over", 0.4, 0.999)
    assert shown_steps(opened) == ({50, 60, 70, 80}, "steps 50 to 80")
    page.select_option(".tools select", label="steps")
    assert pixels(opened, "canvas.lanes") == lanes
    assert shown_steps(opened)[1] == "all steps"
    assert opened.messages == []


def test_sorts_columns_by_values(show, report):  # noqa: F811
    opened = show(report)

    def steps():
        return [int(row["step"]) for row in opened.data("#steps tbody tr")]

    def click(name):
        opened.page.locator("#steps th button", has_text=name).first.click()

    assert steps() == sorted(LOSSES, reverse=True)
    order = opened.page.locator("#steps caption", has_text="The newest first")
    expect(order.locator(".order")).to_be_visible()
    click("eval/loss")
    expect(order.locator(".order")).to_be_hidden()
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


def test_hovering_step_row_shows_step_in_curves(show, report):  # noqa: F811
    opened = show(report)
    point_at(opened, "#steps tbody tr[data-step='40'] th", 0.5)
    assert opened.texts(f"{LOSS} output") == ["step 40: 0.6, kept"]


def test_searches_and_folds_leaves(show, report):  # noqa: F811
    opened = show(report)

    def leaves():
        return [e.get_attribute("data-path") for e in visible(opened, "[data-leaf]")]

    assert leaves() == [], "the section is folded at first"
    unfold(opened, "sizes")
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
def test_layout_stays_still_while_reading_values(show, report, width):  # noqa: F811
    page = show(report, width=width).page
    tops = """() => [...document.querySelectorAll('[data-metric] .u-over, section')]
        .map(each => each.getBoundingClientRect().top + scrollY)"""
    before = page.evaluate(tops)
    page.hover(f"{LOSS} .u-over", position={"x": 60, "y": 80})
    [reading] = page.locator(f"{LOSS} output").all_text_contents()
    assert reading.startswith("step ")
    assert page.locator(f"{LOSS} .facts").is_hidden()
    assert page.evaluate(tops) == before
    page.mouse.move(1, 1)
    assert page.locator(f"{LOSS} .facts").is_visible()
    page.get_by_role("button", name="Export").click()
    expect(page.locator("menu.actions output")).not_to_be_empty()
    assert page.evaluate(tops) == before
    heights = "() => [...document.querySelectorAll('.tools')].map(e => e.offsetHeight)"
    [before] = page.evaluate(heights)
    last, tools = (
        page.locator(which).bounding_box()
        for which in ("menu.actions button >> nth=-1", "#recorder .tools")
    )
    assert tools["y"] - last["y"] - last["height"] < 45, "no gap for a line to come"
    page.focus("canvas.brush")
    page.keyboard.press("+")
    expect(page.locator("output.range")).to_contain_text("steps ")
    assert page.evaluate(heights) == [before]


def test_searches_rows_of_long_table(show, report):  # noqa: F811
    step = report.history[-1]
    many = tuple(dataclasses.replace(step, step=n) for n in range(300))
    opened = show(dataclasses.replace(report, history=many))
    opened.page.fill("#steps [data-search]", "299")
    assert [row["step"] for row in opened.data("#steps tbody tr:not([hidden])")] == [
        "299"
    ]


@pytest.mark.parametrize("width", [390, 1280])
def test_long_table_indicates_more_rows(show, report, width):  # noqa: F811
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
    # In a window with room for nearly all rows, all are shown, and no button.
    opened.page.set_viewport_size({"width": width, "height": round(1.35 * whole)})
    expect(button).to_be_hidden()
    assert box.evaluate("box => box.scrollHeight - box.clientHeight") == 0
    assert opened.messages == []


def test_short_table_has_no_button(show, report):  # noqa: F811
    page = show(report).page
    assert page.locator("#steps tbody tr").count() == len(LOSSES)
    assert page.locator("[data-action=expand]").count() == 0
    sizes = "box => [box.scrollHeight, box.clientHeight]"
    whole, shown = page.locator("#steps .scroll").evaluate(sizes)
    assert whole == shown


def test_search_finds_whole_numbers_and_skips_folded_texts(show, report):  # noqa: F811
    many = tuple(
        SavedStep(n, deleted=math.nan, reason="no policy keeps it")
        for n in range(10, 1010, 10)
    )
    opened = show(dataclasses.replace(report, history=many, steps=()))

    def found(text):
        opened.page.fill("#steps [data-search]", text)
        rows = opened.data("#steps tbody tr:not([hidden])")
        return [int(row["step"]) for row in rows]

    assert found("100") == [100]
    assert found("1000") == found("1,000") == [1000]
    assert found("20") == [20]
    assert found("LatestN") == []
    found("")
    opened.page.click("#steps tr[data-step='30'] summary")
    assert found("20") == [30, 20]
    assert found("LatestN(3)") == [30]
    assert opened.messages == []


def test_sections_fold_and_links_unfold_them(show, report):  # noqa: F811
    opened = show(report)
    assert visible(opened, "#saves .u-over") == []
    opened.page.click("nav a[href='#saves']")
    assert visible(opened, "#saves .u-over") != []
    opened.page.locator("#saves > details > summary").press("Enter")
    assert visible(opened, "#saves .u-over") == []


def test_best_card_links_to_its_row(show, report):  # noqa: F811
    opened = show(report)
    opened.page.click("#steps > details > summary")
    assert visible(opened, "#step-50") == []
    opened.page.click("[data-card=best]")
    [row] = visible(opened, "#step-50")
    assert row.get_attribute("data-step") == "50"
    top = row.bounding_box()["y"]
    assert 0 <= top < opened.page.viewport_size["height"]
    assert opened.page.query_selector("tr:target") is not None


def test_fragments_inserted_later_are_interactive(show, report):  # noqa: F811
    opened = show(report)
    opened.page.evaluate(
        """() => {
            const copy = document.querySelector('#steps').outerHTML;
            document.querySelector('#steps').outerHTML = copy;
            document.querySelector('[data-draw=track]').replaceChildren();
            charts.refresh();
        }"""
    )
    opened.page.locator("#steps th button", has_text="eval/loss").click()
    assert int(opened.data("#steps tbody tr")[0]["step"]) == 50
    assert point_at_step(opened, 10).startswith("eval/loss\nstep 10: 0.9")
    assert opened.messages == []


def test_page_is_complete_without_script(browser, report, tmp_path):  # noqa: F811
    file = tmp_path / "report.html"
    file.write_text(_report.page(report), encoding="utf-8")
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(file.as_uri())
    assert page.locator("section").count() == 9
    assert "best 0.3 at step 50" in page.text_content(".verdict")
    for text in ("no policy keeps it", "params/trunk/kernel", "next_index"):
        assert text in page.content()
    assert page.locator("#steps tbody tr").count() == len(LOSSES)
    assert page.locator("#steps tbody tr >> nth=0").is_visible()
    assert not page.locator("input, [data-action]").first.is_visible()
    context.close()


def test_hostile_names_stay_text_in_tips(show, tmp_path):  # noqa: F811
    bad = "<img src=x onerror=document.title=1>"
    with flaxckpt.Checkpointer(tmp_path / "run") as run:
        for step in (1, 2, 3):
            state = {bad: {"a": np.full(4, step, np.float32)}, "b": np.ones(2)}
            run.save(step, state, metrics={bad: float(step)}).wait()
    opened = show(_report.gather(tmp_path / "run", _report.ReportOptions()))
    point_at(opened, "#recorder .u-over", 0.001)
    assert tip(opened).startswith(f"{bad}\nstep 1: 1")
    unfold(opened, "sizes")
    point_at(opened, f'#sizes .share[data-path="{bad}"]', 0.5)
    assert tip(opened).startswith(bad)
    opened.page.fill("#sizes [data-search]", "<img")
    assert opened.page.query_selector("img") is None
    assert opened.messages == []


def test_pointer_is_exact_on_curve_of_many_values(show, report):  # noqa: F811
    rng = np.random.default_rng(0)
    first = report.metrics["eval/loss"][0]
    values = tuple(
        first._replace(step=100 * n, value=float(rng.normal()), mode=None)
        for n in range(1000)
    )
    opened = show(dataclasses.replace(report, metrics={"m": values}))
    for n in (0, 123, 500, 998):
        point_at(opened, "figure[data-metric=m] .u-over", max(n / 999, 1e-4))
        assert f"step {100 * n:,}: {values[n].value:.6g}" in tip(opened)


def test_scripts_are_small_and_plain():
    script = _report.assets.script()
    assert len(script.encode()) < 98_000, "uPlot is half of it"
    banned = r"innerHTML|outerHTML|insertAdjacent|eval\(|Function\(|fetch\(|XMLHttp"
    assert re.search(banned, script) is None
