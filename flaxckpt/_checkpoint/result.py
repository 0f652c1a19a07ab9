"""What a finished save did."""

from __future__ import annotations

import dataclasses
from typing import Literal


@dataclasses.dataclass(frozen=True, slots=True)
class SaveResult:
    """What a finished save did.

    Attributes:
        step: The checkpoint's step; None if it stands alone.
        path: Where it is.
        bytes_written: Size of the files that were written, less those that were linked
            from the step before.
        blocked_secs: How long the caller waited.
        total_secs: From the call until all was durable and old steps were deleted.
        deleted_steps: Steps that the preservation policies let go; with a staging
            directory, those that are gone from there.
        skipped: None, or why nothing was written.
        tier: Where it is durable: in the `directory` itself, or in the one for
            `staging`, from which it is uploaded.
    """

    step: int | None
    path: str
    bytes_written: int
    blocked_secs: float
    total_secs: float
    deleted_steps: tuple[int, ...] = ()
    skipped: str | None = None
    tier: Literal["directory", "staging"] = "directory"
