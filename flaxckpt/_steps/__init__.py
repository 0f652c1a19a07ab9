"""The steps of a run directory: names, markers, journal of events, deletion."""

from __future__ import annotations

from flaxckpt._steps import delete, event, index, journal, markers, names
