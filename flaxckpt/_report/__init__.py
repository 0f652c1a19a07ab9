"""The HTML report on a run or a checkpoint."""

from __future__ import annotations

from flaxckpt._report.data import Report as Report
from flaxckpt._report.gather import ReportOptions as ReportOptions
from flaxckpt._report.gather import gather as gather
from flaxckpt._report.page import page as page

__all__ = ["Report", "ReportOptions", "gather", "page"]
