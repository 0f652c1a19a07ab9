"""SVG charts: functions from numbers to markup."""

from __future__ import annotations

from flaxckpt._report.charts import histogram as histogram
from flaxckpt._report.charts import share_bar as share_bar
from flaxckpt._report.charts import treemap as treemap

__all__ = ["histogram", "share_bar", "treemap"]
