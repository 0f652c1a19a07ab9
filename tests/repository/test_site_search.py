"""The built site is searched from a disk, in a real browser, without a server."""

import re

import pytest

from tests.report.test_browser import browser
from tests.repository.test_site import site

__all__ = ["browser", "site"]


@pytest.mark.slow
def test_search_works_from_disk(browser, site):
    requests, errors = [], []
    page = browser.new_page(viewport={"width": 1280, "height": 800})
    page.on("request", lambda request: requests.append(request.url))
    page.on("pageerror", lambda error: errors.append(str(error)))
    for start in ("index.html", "reference/policies.html"):
        page.goto((site / start).as_uri())
        page.click("input.md-search__input")
        page.keyboard.type("RestoreMismatchError")
        page.wait_for_selector(".md-search-result__item a")
        page.click(".md-search-result__item a")
        page.wait_for_url(re.compile(r"\?h="))
        assert "RestoreMismatchError" in page.content()
    page.close()
    assert errors == []
    assert {url.partition(":")[0] for url in requests} == {"file"}
