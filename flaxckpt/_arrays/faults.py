"""Leaves that cannot be read, reported together in one error."""

from __future__ import annotations

from pathlib import Path

from flaxckpt import _util, errors
from flaxckpt._types import LeafPath


class Faults:
    """Collects the reasons why leaves cannot be read."""

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
        """Returns the error that names all leaves of the checkpoint at `root`.

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
    """The message of an error, without the specification that TensorStore appends."""
    text = str(error).split(" [tensorstore_spec", maxsplit=1)[0].split(" [source")[0]
    return " ".join(text.split())[:200]
