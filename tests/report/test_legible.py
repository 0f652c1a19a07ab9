"""Each text of a page can be read, each target be hit, and each reached by keys."""

import pytest

from tests.helpers import legible
from tests.report.test_browser import browser, report, show  # noqa: F401
from tests.report.test_script import diverged  # noqa: F401


@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", ["report", "diverged"])
def test_all_texts_and_targets_are_legible(show, request, name, scheme, width):  # noqa: F811
    opened = show(request.getfixturevalue(name), scheme=scheme, width=width)
    page = opened.page
    page.evaluate(
        "document.querySelectorAll('details').forEach(each => { each.open = true })"
    )
    page.locator("figure .u-over").first.hover()
    page.locator(".tip").wait_for()
    found = page.evaluate(legible.FAINT), page.evaluate(legible.SMALL)
    assert found == ([], [])
    assert opened.messages == []


@pytest.mark.parametrize("width", [390, 1280, 2400])
def test_colour_switch_covers_nothing(show, report, width):  # noqa: F811
    page = show(report, width=width).page
    box = page.locator("button.theme").bounding_box()
    header = page.locator("header").bounding_box()
    inset = 12 if width < 620 else 28
    assert box["x"] + box["width"] == pytest.approx(
        header["x"] + header["width"] - inset, abs=1
    )
    texts = """() => [...document.querySelectorAll("header .title > *")].map((each) => {
      const range = document.createRange();
      range.selectNodeContents(each);
      const { right, top, bottom } = range.getBoundingClientRect();
      return [right, top, bottom];
    })"""
    for right, top, bottom in page.evaluate(texts):
        beside = bottom <= box["y"] or top >= box["y"] + box["height"]
        assert beside or right <= box["x"]


def test_tab_key_reaches_all_targets(show, diverged):  # noqa: F811
    opened = show(diverged)
    page = opened.page
    wanted = page.evaluate(legible.TABS)
    reached = set()
    for _ in range(wanted + 5):
        page.keyboard.press("Tab")
        reached.add(
            page.evaluate(
                """() => {
                  const all = [...document.querySelectorAll("*")];
                  return all.indexOf(document.activeElement);
                }"""
            )
        )
        dull = page.evaluate(
            """() => {
              const at = document.activeElement;
              const isSeen = getComputedStyle(at).outlineStyle !== "none";
              return isSeen || at === document.body ? "" : at.outerHTML;
            }"""
        )
        assert dull == ""
    assert len(reached) >= wanted
    assert opened.messages == []
