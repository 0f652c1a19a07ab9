"""SVG charts: functions from numbers to markup."""

from __future__ import annotations

from flaxckpt._report.charts import histogram as histogram

__all__ = ["histogram"]
