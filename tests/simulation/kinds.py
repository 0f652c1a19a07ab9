"""The kinds of histories."""

from collections.abc import Callable
from typing import Any, NamedTuple

from tests.simulation import files, jobs


class Kind(NamedTuple):
    """A kind of histories.

    Attributes:
        history: Runs the history of a seed.
        patches: What it replaces, for `stand_ins.installed`.
    """

    history: Callable[..., Any]
    patches: dict[tuple[Any, str], Any]


KINDS = {
    "files": Kind(files.history, {}),
    "pauses": Kind(files.history_of_pauses, {}),
    "jobs": Kind(jobs.history, jobs.PATCHES),
}
"""Name -> kind."""
