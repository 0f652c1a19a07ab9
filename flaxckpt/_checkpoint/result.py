"""Result of a finished save."""

from __future__ import annotations

import dataclasses
from typing import Literal


@dataclasses.dataclass(frozen=True, slots=True)
class SaveResult:
    """Result of a finished save.

    Attributes:
        step: The checkpoint's step; None for a single checkpoint.
        path: Path of the checkpoint.
        bytes_written: Size of the written files, without files hard-linked from the
            previous step.
        blocked_secs: Seconds that the call blocked the caller.
        total_secs: Seconds from the call until the checkpoint was durable and old steps
            were deleted.
        deleted_steps: Steps deleted by the preservation policies; with a staging
            directory, steps deleted from staging.
        skipped: None, or the reason why nothing was written.
        tier: The tier with the durable checkpoint: `directory`, or `staging`, from
            where it is uploaded.
    """

    step: int | None
    path: str
    bytes_written: int
    blocked_secs: float
    total_secs: float
    deleted_steps: tuple[int, ...] = ()
    skipped: str | None = None
    tier: Literal["directory", "staging"] = "directory"
