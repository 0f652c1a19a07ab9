"""A report on a run: what is known of it, gathered, and drawn on one page."""

from __future__ import annotations

from flaxckpt._report.data import Report as Report
from flaxckpt._report.gather import Options as Options
from flaxckpt._report.gather import gather as gather
from flaxckpt._report.page import page as page

__all__ = ["Options", "Report", "gather", "page"]
