"""The data behind the views, and the fields of a request."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple, TypeAlias
from urllib import parse

from flaxckpt import errors
from flaxckpt._inspect.run_search import Location
from flaxckpt._report.data import Report
from flaxckpt._report.ui import feeds, opened, places, verifications
from flaxckpt._util import html


class Workspace(NamedTuple):
    """The data behind the page."""

    places: places.Places
    feeds: feeds.Feeds
    opened: opened.OpenCheckpoints
    verifications: verifications.Verifications

    def report(self, place: Location) -> Report:
        """Returns `Feeds.latest` of a run, with what verifications have found."""
        return self.verifications.update(place, self.feeds.latest(place).report)

    def version(self, place: Location) -> str:
        """Returns the version of what the views show of a run; grows with its news."""
        snapshot = self.feeds.available(place)
        return self.complete(str(0 if snapshot is None else snapshot.version))

    def complete(self, version: str) -> str:
        """Returns the version of news with that of runs and of verifications."""
        return f"{self.places.version}.{version}.{self.verifications.version}"

    def close(self) -> None:
        """Ends the work in the background, after the files that are being read."""
        self.feeds.close()
        self.verifications.stop()


def open_workspace(found: places.Places) -> Workspace:
    """Returns the data behind a page on runs and checkpoints, until `close`."""
    return Workspace(
        found, feeds.Feeds(), opened.OpenCheckpoints(), verifications.Verifications()
    )


class Query:
    """The fields of a request's address; raises OptionError if not UTF-8, or many."""

    def __init__(self, raw: bytes) -> None:
        try:
            fields = parse.parse_qsl(
                raw.decode("latin-1"),
                keep_blank_values=True,
                errors="surrogatepass",
                max_num_fields=_MOST_FIELDS,
            )
        except ValueError:
            raise errors.OptionError("the address cannot be read") from None
        self._fields: Mapping[str, str] = dict(fields)

    def text(self, name: str) -> str:
        """Returns a field; empty if missing."""
        return self._fields.get(name, "")

    def number(self, name: str) -> int | None:
        """Returns a field that is a step, or None; raises OptionError if invalid."""
        text = self.text(name)
        if not text:
            return None
        if not (text.isascii() and text.isdigit() and len(text) <= _MOST_DIGITS):
            raise errors.OptionError(f"{name} is not the number of a step: {text!r}")
        return int(text)


_MOST_FIELDS = 32
_MOST_DIGITS = 18

View: TypeAlias = Callable[[Workspace, Query], html.Markup]
"""Returns a page, or a part of one, for a request."""
