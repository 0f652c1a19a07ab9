"""SVG charts: functions from numbers to markup."""

from __future__ import annotations

from flaxckpt._report.charts import curves as curves
from flaxckpt._report.charts import histogram as histogram
from flaxckpt._report.charts import run_curves as run_curves
from flaxckpt._report.charts import share_bar as share_bar
from flaxckpt._report.charts import small as small
from flaxckpt._report.charts import step_strip as step_strip
from flaxckpt._report.charts import timeline as timeline
from flaxckpt._report.charts import treemap as treemap

__all__ = [
    "curves",
    "histogram",
    "run_curves",
    "share_bar",
    "small",
    "step_strip",
    "timeline",
    "treemap",
]
