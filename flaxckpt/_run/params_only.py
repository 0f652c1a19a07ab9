"""States that were saved without their optimizer, beside the steps of a run."""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path

from flaxckpt import _steps, errors

_log = logging.getLogger(__name__)

_PARAMS_ONLY = "params_only"
"""The directory, beside the steps, of what was saved without its optimizer."""


class ParamsOnly:
    """The directory of the states that were saved without their optimizer.

    Each is named like the step that it is a part of.

    Args:
        directory: Of the run.
        step_format: How its steps are called.
    """

    def __init__(self, directory: Path, step_format: _steps.names.StepFormat) -> None:
        self._directory = directory / _PARAMS_ONLY
        self._format = step_format

    def path(self, step: int) -> Path:
        """Where that of a step is to be saved.

        Raises:
            SaveFailedError: The directory is a link.
        """
        if self._directory.is_symlink():  # what lies there is somebody else's
            raise errors.SaveFailedError(
                f"{self._directory} is a symbolic link, and nothing is written or"
                " deleted behind one: remove it, then save again"
            )
        return self._directory / self._format.name(step)

    def latest(self) -> tuple[int, Path] | None:
        """The newest step and path; None if there is nothing."""
        listed = _steps.index.listed(self._directory, self._format)
        return max(listed.items(), default=None)

    def keep_only(self, path: Path) -> None:
        """Deletes all others; says which it cannot delete."""
        others = _steps.index.listed(self._directory, self._format).values()
        for other in [other for other in others if other != path]:
            try:
                _steps.delete.delete(other)
            except OSError as error:
                _log.warning("%s stays for now: %s", other, error)

    def tidy(self) -> None:
        """Removes what crashes have left there."""
        with contextlib.suppress(OSError):  # another time
            if self._directory.is_dir() and not self._directory.is_symlink():
                _steps.delete.tidy(self._directory, self._format, ())
