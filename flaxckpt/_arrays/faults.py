"""Collects unreadable leaves, and reports all in a single error."""

from __future__ import annotations

from pathlib import Path

from flaxckpt import _util, errors
from flaxckpt._types import LeafPath


class Faults:
    """Unreadable leaves with reasons."""

    def __init__(self) -> None:
        self._reasons: dict[LeafPath, str] = {}
        self._too_large: _util.memory.TooLargeError | None = None

    def __len__(self) -> int:
        return len(self._reasons)

    def __contains__(self, path: LeafPath) -> bool:
        return path in self._reasons

    def add(self, path: LeafPath, error: Exception) -> None:
        """Records `error` as the reason of the leaf `path`."""
        if isinstance(error, MemoryError):
            error = _util.memory.TooLargeError()
        if isinstance(error, _util.memory.TooLargeError):
            self._too_large = _util.memory.TooLargeError(*error.args)  # no traceback
        self._reasons[path] = _first_words(error)

    def error(
        self, root: Path | str, advice: str = "Restore another step"
    ) -> errors.DamagedCheckpointError:
        """Returns an error with all faults of the checkpoint at `root`.

        Its cause is a `TooLargeError` if memory was short.
        """
        count = f"{len(self)} leaves" if len(self) > 1 else "1 leaf"
        error = errors.DamagedCheckpointError(
            f"{count} of {root} cannot be read:\n"
            + errors.rows(f"{path}: {why}" for path, why in self._reasons.items())
            + f"\n{advice}, or save the checkpoint again."
        )
        error.__cause__ = self._too_large
        return error


def _first_words(error: Exception) -> str:
    """Returns the message of an error, without TensorStore's spec."""
    text = str(error).split(" [tensorstore_spec", maxsplit=1)[0].split(" [source")[0]
    return " ".join(text.split())[:200]
