"""A real browser, for the tests of pages.

Skipped where there is no Chromium. FLAXCKPT_CHROMIUM names one.
"""

import os
import shutil

import pytest

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is missing")

ARGUMENTS = [
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update"),
    "--disable-sync",
]


def chromium():
    """Returns the path of a browser, or None."""
    named = os.environ.get("FLAXCKPT_CHROMIUM")
    names = (named,) if named else ("chromium", "chromium-browser", "google-chrome")
    return next((found for name in names if (found := shutil.which(name))), None)


@pytest.fixture(scope="module")
def browser():
    path = chromium()
    if path is None:
        pytest.skip("no Chromium: install one, or name it in FLAXCKPT_CHROMIUM")
    with sync_api.sync_playwright() as playwright:
        started = playwright.chromium.launch(
            executable_path=path, headless=True, args=ARGUMENTS
        )
        yield started
        started.close()
