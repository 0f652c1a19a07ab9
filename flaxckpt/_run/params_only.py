"""States saved without their optimizer, beside the steps of a run."""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path

from flaxckpt import _checkpoint, _steps, errors
from flaxckpt._run import left_out

_log = logging.getLogger(__name__)

_PARAMS_ONLY = "params_only"
"""Name of the directory, beside the steps."""


class ParamsOnly:
    """The directory of states without their optimizer, each named like its step."""

    def __init__(self, directory: Path, step_format: _steps.names.StepFormat) -> None:
        self._directory = directory / _PARAMS_ONLY
        self._format = step_format

    def path(self, step: int) -> Path:
        """Returns the path for a step, or raises SaveFailedError for a link."""
        if self._directory.is_symlink():  # the target belongs to others
            raise errors.SaveFailedError(
                f"{self._directory} is a symbolic link, and flaxckpt writes and deletes"
                " nothing behind symbolic links: remove it, then save again"
            )
        return self._directory / self._format.name(step)

    def latest(self) -> tuple[int, Path] | None:
        """Returns the newest step and path, also with names of an earlier start."""
        listed = _steps.index.list_steps(self._directory, self._format)
        others = left_out.find(self._directory, self._format, None)
        return max([*others.items(), *listed.items()], default=None)

    def keep_only(self, path: Path) -> None:
        """Deletes all states except `path`; logs states that cannot be deleted."""
        others = _steps.index.list_steps(self._directory, self._format).values()
        for other in [other for other in others if other != path]:
            try:
                _steps.delete.delete(
                    other, find_foreign=_checkpoint.overwrite.find_foreign
                )
            except (OSError, errors.SaveFailedError) as error:
                _log.warning("cannot delete %s: %s", other, error)

    def tidy(self) -> None:
        """Removes files left by crashes."""
        with contextlib.suppress(OSError):  # retried at the next start
            if self._directory.is_dir() and not self._directory.is_symlink():
                _steps.delete.tidy(self._directory, self._format, ())
