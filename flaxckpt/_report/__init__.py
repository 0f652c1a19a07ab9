"""What people see in the browser: the HTML report, and in `ui` the local page.

Data flow one way: `gathering` reads a `Report` once, numbers and names; `content`
prepares what templates show, without markup; `templates` renders them, and escapes
every name. `content.page` is the page that is one file; `ui` answers a browser with the
same sections.

The macros are in `templates/macros.html`. None has inline styles, handlers or
identifiers of its own except sections and the rows of steps. The script handles events
on the document, so that markup inserted later works, too. These are its marks, which
pages may set on other elements as well:

| mark | effect |
|---|---|
| `data-tip` | the text beside the pointer |
| `[data-charts]`, `[data-draw]` | the data of the page, and where `charts.js` draws them |
| `tr[data-step]` | a pointer on the row shows the step in all curves; hidden outside of the chosen steps |
| `button[data-action=expand]` | shows all rows of its `.table` without a box |
| `button[data-copy]` | copies a command, with the chosen step for `{step}` |
| `button[data-series]` | shows and hides a run in all curves |
| `th > button.sort` | sorts the rows by `td[data-v]`, or by the text |
| `input[data-search]` | hides the `tbody tr` and `[data-leaf]` of its `data-scope` that lack a word, in their text outside of closed folds and `data-path` (whole numbers match whole numbers, `lr=0.1` a whole tag); unfolds `[data-branch] > details`; counts in `output.found` |
| `[data-address]` | a control whose value is in the address of the page, under this name |
| `button[data-action=fold]`, `unfold` | all `[data-branch]` of the `data-scope` |
| `.control` | is visible only while the script runs, which marks the page with `html.live` |
"""  # noqa: E501

from __future__ import annotations

from typing import TYPE_CHECKING

from flaxckpt import _doors

if TYPE_CHECKING:
    from flaxckpt._report import data, flight_recorder, ui
    from flaxckpt._report.content import page
    from flaxckpt._report.data import Report
    from flaxckpt._report.gathering import ReportOptions, gather

__all__ = ["Report", "ReportOptions", "data", "flight_recorder", "gather", "page", "ui"]

if not TYPE_CHECKING:
    __getattr__ = _doors.opener(
        __name__,
        ("content", "flight_recorder", "gathering"),
        {
            "Report": "data",
            "ReportOptions": "gathering",
            "gather": "gathering",
            "page": "content",
        },
    )
