"""The local page in a real browser, with a run that goes on.

Skipped where there is no Chromium. FLAXCKPT_CHROMIUM names one; pictures of the page go
to FLAXCKPT_ARTIFACTS, if that is set.
"""

import os
import re
import shutil
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import flaxckpt
from flaxckpt.policies import EveryNSteps
from tests.helpers import chunks, slow
from tests.helpers.browsers import browser, sync_api
from tests.helpers.files import flip_bit, largest_file
from tests.helpers.printed import pages_of_table
from tests.helpers.report_runs import make_run
from tests.helpers.ui_server import serving

pytest.importorskip("starlette", reason="starlette is missing")
pytest.importorskip("uvicorn", reason="uvicorn is missing")

pytest.importorskip("flaxckpt._report.ui.app")

__all__ = ["browser"]

PATIENCE_MS = 120_000
"""How long to wait for what comes in the end: only a fault takes so long."""

WIDTHS = (390, 1280, 1920)
sync_api.expect.set_options(timeout=PATIENCE_MS)

BAD = "<script>document.title='run'</script>\"'>"
WORSE = "<img src=x onerror=\"document.title='run'\">"


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A directory with the runs `run`, `growing` and `hostile`, and `source`."""
    root = tmp_path_factory.mktemp("ui")
    make_run(root)
    with flaxckpt.Checkpointer(root / "growing") as run:
        for step in (1, 2):
            save(run, step)
    with flaxckpt.Checkpointer(root / BAD.replace("/", "|")) as run:
        for step in (1, 2):
            state = {BAD: {WORSE: jnp.full(3, step)}, WORSE: "</code><b>"}
            run.save(step, state, metrics={BAD: step, WORSE: -step})
    return root


def save(run, step):
    state = {"layers": {f"layer_{n}": {"w": np.full(4, n + step)} for n in range(600)}}
    run.save(step, state, metrics={"loss": 1 / step})


@pytest.fixture(scope="module")
def served(runs):
    with serving(runs) as server:
        yield server


class Page:
    """A page in the browser, with its messages and the hosts that it asked."""

    def __init__(self, browser, served, width=1280, scheme="light"):
        self.served = served
        self.context = browser.new_context(
            viewport={"width": width, "height": 900}, color_scheme=scheme
        )
        self.context.set_default_timeout(PATIENCE_MS)
        self.page = self.context.new_page()
        self.messages, self.requests = [], []
        self.page.on("console", lambda message: self.messages.append(message.text))
        self.page.on("pageerror", lambda error: self.messages.append(str(error)))
        self.page.on("dialog", lambda dialog: self.messages.append(dialog.message))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(served.address)

    def open(self, path, **fields):
        self.page.goto(self.served.url(path, **fields))
        return self.page

    def texts(self, selector):
        return self.page.locator(selector).all_text_contents()

    @property
    def is_quiet(self):
        own = f"http://{self.served.host}/"
        foreign = [url for url in self.requests if not url.startswith(own)]
        return (self.messages, foreign) == ([], [])


@pytest.fixture
def visit(browser, served):
    """A function that opens the first page."""
    opened = []

    def start(**given):
        opened.append(Page(browser, served, **given))
        return opened[-1]

    yield start
    for each in opened:
        each.context.close()


def picture(page, tmp_path, name):
    directory = Path(os.environ.get("FLAXCKPT_ARTIFACTS") or tmp_path)
    directory.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=directory / f"ui-{name}.png", full_page=True)


VIEWS = {
    "runs": ("/", {}, "#all-runs tr[data-run]"),
    "overview": ("/run", {"run": "run"}, "#steps tr[data-step]"),
    "leaves": ("/leaves", {"run": "run", "leaf": "params/head"}, "#leaf dl"),
    "compare": ("/compare", {"run": "run", "a": 70, "b": 80}, "#result details"),
    "plan": ("/plan", {"run": "run", "into": "source"}, "#result .outcome"),
    "rules": (
        "/plan",
        {"run": "run", "into": "run", "rename": "params/(.*)=weights/\\1"},
        "#result .outcome",
    ),
    "verify": ("/verify", {"run": "run", "step": "all"}, "form.choices button"),
}


@pytest.mark.parametrize("width", slow.all_but(WIDTHS, [1280]))
@pytest.mark.parametrize("view", VIEWS)
def test_each_view_fits_window_without_errors(visit, tmp_path, view, width):
    opened = visit(width=width, scheme="dark" if width == 1280 else "light")
    path, fields, wanted = VIEWS[view]
    page = opened.open(path, **fields)
    page.wait_for_selector(wanted)
    picture(page, tmp_path, f"{view}-{width}")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert opened.is_quiet, opened.messages
    assert served_token_is_gone(opened)


def served_token_is_gone(opened):
    """The token is in no address or text that the page has."""
    token = opened.served.token
    return token not in opened.page.url and token not in opened.page.content()


def test_new_step_appears_while_run_saves(visit, runs):
    opened = visit()
    opened.page.clock.install()
    page = opened.open("/run", run="growing")
    page.wait_for_selector("#steps tr[data-step='2']")
    page.click("#saves > details > summary")  # folds stay as the reader set them
    page.click("#steps > details > summary")
    sync_api.expect(page.locator("#news")).to_have_text("up to date")
    with flaxckpt.Checkpointer(runs / "growing") as run:
        save(run, 3)
    page.wait_for_selector("#steps tr[data-step='3']", state="attached")
    sync_api.expect(page.locator("#news")).to_have_text("step 3 saved")
    age = page.locator("[data-card=newest] time")
    sync_api.expect(age).to_have_text(re.compile("^[0-9]+ (s|min) ago$"))
    assert re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d$", age.get_attribute("data-tip"))
    assert page.get_attribute("#saves > details", "open") is not None
    assert page.get_attribute("#steps > details", "open") is None
    sync_api.expect(page.locator("figure[data-metric=loss] .facts")).to_contain_text(
        "at step 3"
    )
    page.clock.fast_forward("02:00")  # news are no news for ever
    sync_api.expect(page.locator("#news")).to_have_text("up to date")
    assert opened.is_quiet, opened.messages
    page.route("**/news*", lambda route: route.fulfill(status=403))
    sync_api.expect(page.locator("#news.bad")).to_contain_text("not connected")
    page.unroute("**/news*")
    sync_api.expect(page.locator("#news:not(.bad)")).to_have_text("up to date")


@pytest.mark.slow
@pytest.mark.parametrize(
    "view", slow.all_but(["/compare", "/verify", "/plan", "/leaves"], ["/verify"])
)
def test_step_lists_follow_run_and_keep_selection(browser, tmp_path, view):
    with flaxckpt.Checkpointer(tmp_path / "run") as run:
        for step in (1, 2, 3):
            save(run, step)
    with serving(tmp_path / "run") as server:
        opened = Page(browser, server)
        page = opened.open(view, run="run")
        if view == "/compare":  # the steps are not deleted while they are compared
            page.wait_for_selector("#result .summary-text")
        lists = page.locator("form.choices select:has(option[value='3'])")
        chosen = lists.first
        if view != "/leaves":  # which shows a step as soon as it is chosen
            chosen.select_option("2")
        before = chosen.input_value()
        sync_api.expect(page.locator("#news")).to_have_text("up to date")
        sync_api.expect(page.locator("#news.bad")).to_have_count(0)
        with flaxckpt.Checkpointer(tmp_path / "run") as run:
            save(run, 4)
            run.delete(2)
        wanted = page.locator("form.choices select option[value='4']")
        sync_api.expect(wanted).to_have_count(lists.count())
        assert chosen.input_value() == before
        largest_file(tmp_path / "run/1/state/d").write_bytes(b"")
        with flaxckpt.Checkpointer(tmp_path / "run") as run:
            assert not run.verify(1).ok
        sync_api.expect(page.locator("#news.bad")).to_contain_text("step 1 damaged")
        damaged = page.locator("form.choices select option[value='1']").first
        sync_api.expect(damaged).to_contain_text("damaged")
        assert chosen.input_value() == before
        assert opened.is_quiet, opened.messages
        opened.context.close()


def test_live_update_keeps_reader_state(browser, tmp_path):
    keep = [flaxckpt.policies.BestN(1, "loss", "min"), EveryNSteps(1)]
    with flaxckpt.Checkpointer(tmp_path / "run", keep=keep) as run:
        for step in range(1, 15):
            run.save(step, {"w": np.full(4, step)}, metrics={"loss": 1 / step})
    with serving(tmp_path / "run") as server:
        opened = Page(browser, server)
        page = opened.page
        page.focus("canvas.brush")
        page.keyboard.press("+")
        shown = page.locator("output.range").first
        sync_api.expect(shown).to_have_text("steps 4 to 11")
        page.click("[data-metric=loss] [data-action=log-axis]")
        page.click("#saves > details > summary")
        page.locator("#steps th button").first.click()
        page.fill("#steps [data-search]", "9")
        sync_api.expect(page.locator("#news")).to_have_text("up to date")
        with flaxckpt.Checkpointer(tmp_path / "run", keep=keep) as run:
            run.save(15, {"w": np.full(4, 15)}, metrics={"loss": 1 / 15})
        facts = page.locator("figure[data-metric=loss] .facts")
        sync_api.expect(facts).to_contain_text("last 0.0666667 at step 15")
        sync_api.expect(page.locator(".verdict")).to_contain_text("at step 15 (loss)")
        sync_api.expect(shown).to_have_text("steps 4 to 11")
        log = page.locator("[data-metric=loss] [data-action=log-axis]")
        assert log.get_attribute("aria-pressed") == "true"
        assert page.get_attribute("#saves > details", "open") is not None
        assert page.locator("#steps th[aria-sort=ascending]").count() == 1
        search = page.locator("#steps [data-search]")
        assert search.input_value() == "9"
        assert search.evaluate("each => each === document.activeElement")
        rows = page.locator("#steps tbody tr:visible")
        assert rows.evaluate_all("all => all.map(each => each.dataset.step)") == ["9"]
        assert opened.is_quiet, opened.messages
        opened.context.close()


def test_button_hides_and_shows_run_in_curves(visit):
    opened = visit()
    page = opened.page
    page.wait_for_selector("button[data-series=growing]")
    page.wait_for_selector("figure[data-metric=loss] canvas")
    drawn = "each => each.toDataURL()"
    others = page.locator("figure[data-metric='eval/loss'] canvas")
    first = others.evaluate(drawn)
    canvas = page.locator("figure[data-metric=loss] canvas")
    before = canvas.evaluate(drawn)
    page.locator("figure[data-metric=loss] .u-over").click()
    page.mouse.move(1, 1)
    button = page.locator("button[data-series=growing]")
    button.press("Enter")
    assert button.get_attribute("aria-pressed") == "false"
    assert canvas.is_hidden(), "no other run has the metric"
    small = page.locator("button[data-series]").filter(has_text="script")
    small.press("Enter")
    assert others.evaluate(drawn) != first, "the steps are those of the other runs"
    small.press("Enter")
    button.press("Enter")
    assert canvas.evaluate(drawn) == before
    assert others.evaluate(drawn) == first
    assert opened.is_quiet, opened.messages


def test_keyboard_skips_header_and_switches_theme(visit):
    opened = visit()
    page = opened.open("/run", run="run")
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "main"
    back = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(back)
    page.locator("button.theme").press("Enter")
    assert page.evaluate(back) != light
    page.reload()
    assert page.evaluate(back) != light, "the browser remembers it"
    assert opened.is_quiet, opened.messages


def test_unfolds_searches_and_reads_leaves(visit):
    opened = visit()
    page = opened.open("/leaves", run="growing", step=2)
    assert page.locator("#tree [data-leaf]").count() == 0  # 600 are not sent at first
    page.click("li[data-path=layers] > details > summary")
    page.wait_for_selector("li[data-path='layers/layer_7']")
    page.click("text=400 more")
    page.click("text=200 more")
    page.wait_for_selector("li[data-path='layers/layer_599']")
    within = page.locator("#tree > ul").evaluate("e => e.scrollHeight - e.clientHeight")
    assert within == 0, "the tree scrolls, not a box in it"
    page.click("li[data-path='layers/layer_7'] > details > summary")
    page.wait_for_selector("li[data-path='layers/layer_7/w']")
    page.fill("input[name=q]", "W layer_59")
    page.wait_for_selector("text=11 of 600 leaves")
    assert set(opened.texts("#tree a")) == {
        "layers/layer_59/w",
        *(f"layers/layer_{n}/w" for n in range(590, 600)),
    }
    page.click("text=layers/layer_590/w")
    sync_api.expect(page.locator("#leaf h2")).to_have_text("layers/layer_590/w")
    numbers = dict(zip(opened.texts("#leaf dt"), opened.texts("#leaf dd"), strict=True))
    assert numbers["elements"] == "4"
    assert numbers["mean"] == numbers["min"] == numbers["max"] == "592"
    assert page.locator("#leaf rect[data-count='4']").count() == 1
    assert "leaf=layers%2Flayer_590%2Fw" in page.url
    page.reload()
    sync_api.expect(page.locator("#leaf h2")).to_have_text("layers/layer_590/w")
    page.fill("input[name=q]", "no such leaf")
    page.wait_for_selector("text=0 of 600 leaves")
    page.fill("input[name=q]", "")
    page.wait_for_selector("li[data-path=layers] > details")
    assert opened.is_quiet, opened.messages


def test_selects_another_step_from_list(visit):
    page = visit().open("/leaves", run="growing")
    page.select_option("select[name=step]", "1")
    page.wait_for_selector("text=Leaves of step 1")
    assert "step=1" in page.url


def test_compares_two_steps(visit, runs):
    opened = visit()
    page = opened.open("/compare", run="run")
    page.select_option("select[name=a]", "70")
    page.click("form button")
    page.wait_for_selector("#result details")
    truth = flaxckpt.diff(runs / "run", runs / "run", step_a=70, step_b=80)
    paths = page.eval_on_selector_all(
        "#result tr[data-path]", "rows => rows.map(row => row.dataset.path)"
    )
    assert set(paths) == set(truth.changed)
    assert f"{len(truth.same)} did not" in page.text_content("#result")
    assert opened.is_quiet, opened.messages


@pytest.mark.slow
def test_selecting_another_run_lists_its_steps(visit):
    opened = visit()
    page = opened.open("/compare", run="run", a=70)
    page.select_option("select[name=with]", "growing")
    page.wait_for_url("**with=growing*")
    own = page.eval_on_selector_all(
        "select[name=b] option", "options => options.map(option => option.value)"
    )
    assert own[-1] == "1"
    assert page.input_value("select[name=a]") == "70"
    page.wait_for_selector("#result .summary-text")  # with its newest step
    page.select_option("select[name=b]", "1")
    page.click("form button")
    page.wait_for_selector("#result .summary-text")
    assert "step 1 of growing" in page.text_content("#result")
    assert opened.is_quiet, opened.messages


def test_plans_restore(visit):
    opened = visit()
    page = opened.open("/plan", run="run")
    page.select_option("select[name=into]", "source")
    page.click("form button")
    page.wait_for_selector("#result .outcome.bad")
    assert "3 leaves of source cannot be restored" in page.text_content("#result")
    rows = page.locator("#result tr[data-actions=conflict]")
    assert rows.count() == 3
    assert opened.is_quiet, opened.messages


@pytest.mark.slow
def test_marks_result_of_earlier_choices(visit):
    opened = visit()
    before = "getComputedStyle(document.getElementById('result'), '::before').content"
    page = opened.open("/plan", run="run", into="run")
    page.wait_for_selector("#result .outcome.good")
    assert page.evaluate(before) == "none"
    page.select_option("select[name=into]", "source")
    assert page.evaluate(before) == '"Of the choices before:"'
    page.click("form button")
    page.wait_for_selector("#result .outcome.bad")
    assert page.evaluate(before) == "none"
    assert opened.is_quiet, opened.messages


def test_plans_restore_with_rules(visit):
    opened = visit()
    page = opened.open("/plan", run="run", into="source")
    page.wait_for_selector("#result .outcome.bad")
    page.click("details.transforms > summary")
    page.fill("textarea[name=drop]", "params/head")
    page.fill("textarea[name=cast]", "params/.*=bfloat16")
    page.click("form button")
    page.wait_for_selector("text=by cast", state="attached")
    assert "of source cannot be restored" in page.text_content("#result")
    page.fill("textarea[name=drop]", "no/such/leaf")
    page.click("form button")
    page.wait_for_selector("#result [role=alert]")
    assert "matches no leaf" in page.text_content("#result")
    assert page.input_value("textarea[name=cast]") == "params/.*=bfloat16"


@pytest.mark.slow
def test_suggests_renames_for_state_written_meanwhile(browser, tmp_path):
    params = {"up": jnp.ones((4, 6)), "down": jnp.ones((6, 4))}
    with flaxckpt.Checkpointer(tmp_path / "run") as run:
        run.save(1, {"params": {"enc": params}})
    with serving(tmp_path / "run") as server:
        opened = Page(browser, server, width=390)
        page = opened.open("/plan", run="run")
        (tmp_path / "wanted.json").write_text(
            '{"params": {"top": {"up": "float32[4, 6]"}, "end": {"down":'
            ' "float32[6, 4]"}, "head": "float32[9]"}}'
        )
        page.reload()
        page.select_option("select[name=into]", "wanted.json")
        page.click("form button")
        page.wait_for_selector("#result .outcome.bad")
        page.click("#remedy button")
        page.click("#remedy a")
        page.wait_for_selector("text=by rename", state="attached")
        rule = page.input_value("textarea[name=rename]")
        assert rule.split() == [
            "params/enc/down=params/end/down",
            "params/enc/up=params/top/up",
        ]
        assert "1 leaf of wanted.json cannot be" in page.text_content("#result")
        width = "document.documentElement.scrollWidth - innerWidth"
        assert page.evaluate(width) <= 0
        assert opened.is_quiet, opened.messages
        opened.context.close()


def test_verifies_run_and_shows_its_damage(visit, runs, tmp_path):
    shutil.copytree(runs / "run", runs / "harmed")
    chunks.flip(runs / "harmed/70/state", "params.trunk.kernel/c.0.0")
    opened = visit()
    page = opened.page
    page.wait_for_selector("#all-runs tr[data-run='harmed']", timeout=PATIENCE_MS)
    page = opened.open("/run", run="harmed")
    page.click("#integrity > details > summary")
    page.click("#integrity a")
    page.select_option("select[name=step]", "80")
    page.click("form button")
    page.wait_for_selector("#verification .outcome.good")
    assert "Step 80 of harmed is whole" in page.text_content("#verification")
    page.select_option("select[name=step]", "all")
    page.click("form button")
    page.wait_for_selector("#verification .outcome.bad")
    assert "1 of 6 steps damaged: 70" in page.text_content("#verification")
    place = page.get_attribute("#verification tr[data-place]", "data-place")
    truth = flaxckpt.verify(runs / "harmed", step=70)
    assert place in truth.places.values()
    for width in WIDTHS:
        page.set_viewport_size({"width": width, "height": 900})
        picture(page, tmp_path, f"verified-{width}")
        assert page.evaluate("document.documentElement.scrollWidth") <= width
    page = opened.open("/run", run="harmed")  # remembered
    page.wait_for_selector("#steps tr.bad[data-step='70']")
    assert "1 damaged" in page.text_content("[data-card=integrity]")
    assert "step 70 damaged" in page.text_content("figure[data-metric='eval/loss']")
    assert "Step 70 is damaged, newest good 80" in page.text_content(".verdict")
    picture(page, tmp_path, "damaged")
    assert opened.is_quiet, opened.messages


@pytest.mark.slow
def test_open_pages_follow_verifications_and_marks(visit, runs, tmp_path):
    best = flaxckpt.policies.BestN(1, "loss", "min")
    with flaxckpt.Checkpointer(runs / "marked", keep=[best, EveryNSteps(1)]) as run:
        for step in (25, 26, 27):
            run.save(step, {"w": np.full((64, 8), step)}, metrics={"loss": 1 / step})
        run.delete(25)
    first = visit()
    first.page.wait_for_selector("#all-runs tr[data-run='marked']", timeout=PATIENCE_MS)
    page = first.open("/verify", run="marked", step=27)
    newest = page.locator("select[name=step] option[value='27']")
    sync_api.expect(newest).to_have_text("only step 27, latest, best")
    page.click("form button")
    page.wait_for_selector("#verification .outcome.good")
    chunk = largest_file(runs / "marked" / "27" / "state")
    flip_bit(chunk)
    page.wait_for_selector("#verification .outcome.open")
    assert "it has changed on the disk" in page.text_content(".outcome")
    page.click("form button")
    page.wait_for_selector("#verification .outcome.bad")
    sync_api.expect(newest).to_have_text("only step 27, damaged")
    picture(page, tmp_path, "verify-follows-damage")
    page.select_option("select[name=step]", "26")
    page.wait_for_selector("#verification .outcome", state="detached")
    assert page.locator("#verification .faults").count() == 0
    other = visit().open("/verify", run="marked", step=25)
    assert other.locator("#verification .outcome").count() == 0
    assert "marked has no step 25" in other.text_content("#verification")
    picture(other, tmp_path, "verify-deleted")
    page.select_option("select[name=step]", "27")
    page.wait_for_selector("#verification .outcome.bad")
    flip_bit(chunk)  # repaired
    sync_api.expect(newest).to_have_text("only step 27, latest, best")
    page.click("form button")
    page.wait_for_selector("#verification .outcome.good")
    flip_bit(chunk)
    with flaxckpt.Checkpointer(runs / "marked") as run:
        run.verify(27)
    sync_api.expect(newest).to_have_text("only step 27, damaged")
    page.wait_for_selector("#verification .outcome.bad")
    assert "it was marked as damaged at" in page.text_content(".outcome")
    picture(page, tmp_path, "verify-marked-later")
    assert first.is_quiet, first.messages


@pytest.mark.slow
def test_run_started_later_appears_by_itself(visit, runs):
    opened = visit()
    page = opened.page
    page.wait_for_selector("#all-runs tr[data-run='run']")
    sync_api.expect(page.locator("#news")).to_have_text(re.compile(".+"))
    with flaxckpt.Checkpointer(runs / "later") as run:
        save(run, 1)
    page.wait_for_selector("#all-runs tr[data-run='later']", timeout=PATIENCE_MS)
    page.click("#all-runs tr[data-run='later'] a")
    page.wait_for_selector("#steps tr[data-step='1']")
    shutil.rmtree(runs / "later")
    page.wait_for_selector("text=no run or checkpoint", timeout=PATIENCE_MS)


@pytest.mark.slow
def test_table_still_shows_all_rows_after_save(visit, runs):
    with flaxckpt.Checkpointer(runs / "many") as run:
        for step in range(1, 31):
            run.save(step, {"w": np.ones(2)})
    opened = visit()
    page = opened.page
    page.wait_for_selector("#all-runs tr[data-run='many']", timeout=PATIENCE_MS)
    page = opened.open("/run", run="many")
    page.click("#steps button:has-text('Show all 30 rows')")
    with flaxckpt.Checkpointer(runs / "many") as run:
        run.save(31, {"w": np.ones(2)})
    page.wait_for_selector("#steps tr[data-step='31']", timeout=PATIENCE_MS)
    box = page.locator("#steps .scroll")
    assert box.evaluate("box => box.scrollHeight === box.clientHeight")
    assert opened.is_quiet, opened.messages


@pytest.mark.slow
def test_loads_data_of_all_runs_once(visit):
    opened = visit()
    opened.page.wait_for_selector("#all-runs tr[data-run='run']")
    sync_api.expect(opened.page.locator("#runs .message")).to_have_count(0)
    loads = []
    while 1 not in loads and len(loads) < 5:  # news of a change load them once more
        opened.requests.clear()
        opened.page.reload()  # all runs have been read
        opened.page.wait_for_selector("#all-runs tr[data-run='run']")
        sync_api.expect(opened.page.locator("#news")).to_have_text(re.compile(".+"))
        opened.page.wait_for_timeout(1500)
        loads.append(len([url for url in opened.requests if url.endswith("/runs")]))
    assert 1 in loads, loads


def test_curves_respond_to_pointer_and_log_button(visit):
    opened = visit()
    page = opened.open("/run", run="run")
    figure = page.locator("figure[data-metric='eval/loss']")
    figure.locator(".plot").hover()
    sync_api.expect(figure.locator("output")).to_contain_text("step")
    log = figure.locator("button")
    log.click()
    sync_api.expect(log).to_have_attribute("aria-pressed", "true")
    assert opened.is_quiet, opened.messages


def test_names_containing_scripts_run_nothing(visit):
    opened = visit()
    run = BAD.replace("/", "|")
    page = opened.page
    page.wait_for_selector("#all-runs tr[data-run]")
    assert run in " ".join(opened.texts("#all-runs a"))
    page = opened.open("/run", run=run)
    page.wait_for_selector("#steps tr[data-step]")
    assert BAD in " ".join(opened.texts("figcaption"))
    page = opened.open("/leaves", run=run)
    page.fill("input[name=q]", "img")
    page.wait_for_selector("text=2 of 2 leaves")
    page.locator("#tree a").last.click()
    sync_api.expect(page.locator("#leaf h2")).to_contain_text("onerror")
    page = opened.open("/compare", run=run, a=1, b=2)
    page.wait_for_selector("#result details")
    page = opened.open("/plan", run=run, into="run")
    page.wait_for_selector("#result .outcome")
    assert page.locator("img, body script").count() == 0
    assert page.title().endswith("flaxckpt")
    assert opened.is_quiet, opened.messages


def test_shows_errors_in_place_of_result(visit):
    opened = visit()
    page = opened.open("/compare", run="growing", a=1, b=1)
    page.wait_for_selector("#result .message.error")
    assert "two different steps" in page.text_content("#result")
    page = opened.open("/run", run="nothing")
    assert "no run or checkpoint" in page.text_content("[role=alert]")


def test_page_of_another_site_reads_nothing(browser, served, tmp_path):
    context = browser.new_context()
    page = context.new_page()
    page.goto(served.address)
    page.wait_for_selector("#news")
    other = context.new_page()
    file = tmp_path / "other.html"
    file.write_text(
        f"<iframe src='{served.url('/run', run='run')}'></iframe>"
        f"<script src='{served.url('/static/ui.js')}'></script><p id=p></p>"
    )
    other.goto(file.as_uri())
    read = other.evaluate(
        "url => fetch(url, {credentials: 'include', mode: 'no-cors'})"
        ".then(reply => reply.type, error => 'refused')",
        served.url("/run", run="run"),
    )
    assert read in ("refused", "opaque")
    [frame] = [each for each in other.frames if each != other.main_frame]
    assert "flaxckpt" not in frame.content() or "chrome-error" in frame.url
    context.close()


@pytest.mark.slow
def test_long_comparison_repeats_headings_on_printed_pages(browser, served):
    context = browser.new_context(bypass_csp=True)
    page = context.new_page()
    page.goto(served.address)
    page.goto(served.url("/compare", run="growing", a=1, b=2))
    page.wait_for_selector("#result tbody th", timeout=PATIENCE_MS)
    headed = pages_of_table(page, "#result")
    assert len(headed) > 3
    assert all(headed)
    context.close()
