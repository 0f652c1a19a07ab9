"""The targets of flaxckpt, and the verdict on a run."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from benchmarks.samples import Results, Series


@dataclass(frozen=True, slots=True)
class Target:
    """A target: a median of at most `limit` times the median of `base`.

    Attributes:
        what: A description.
        measured: The measured series.
        limit: In units of `base`; without a base, in units of the measurement.
        base: A series of the same run to compare with.
    """

    what: str
    measured: Series
    limit: float
    base: Series | None = None


@dataclass(frozen=True, slots=True)
class Verdict:
    """The verdict on a run.

    Attributes:
        target: The target.
        value: The ratio of medians, or the median; None if not measured.
    """

    target: Target
    value: float | None

    @property
    def is_met(self) -> bool | None:
        """True if the target is met; None if it was not measured."""
        return None if self.value is None else self.value <= self.target.limit


def judge(results: Results, targets: Iterable[Target]) -> list[Verdict]:
    """Compares the medians of a run with `targets`."""
    return [Verdict(target, _value(results, target)) for target in targets]


def _value(results: Results, target: Target) -> float | None:
    if target.measured not in results:
        return None
    value = results[target.measured].median
    if target.base is None:
        return value
    if target.base not in results or results[target.base].median <= 0:
        return None
    return value / results[target.base].median


def _against(
    what: str, case: str, figure: str, ours: str, limits: dict[str, float]
) -> list[Target]:
    """Returns targets for a figure of flaxckpt compared with other contenders."""
    measured = Series(case, figure, ours)
    return [
        Target(f"{what}, to {other}", measured, limit, Series(case, figure, other))
        for other, limit in limits.items()
    ]


def _frozen(kind: str) -> Target:
    return Target(
        f"second save, 99 % {kind}, to the first",
        Series("frozen", f"second save, {kind}", "flaxckpt"),
        0.03,
        Series("frozen", "first save", "flaxckpt"),
    )


def _flat_files() -> list[Target]:
    case, used, cast = "flat_files", "restore and use", "bfloat16 to float32"
    own = Series(case, used, "flaxckpt")
    return [
        Target(
            "restore a converted file, to our own format",
            Series(case, used, "flaxckpt converted"),
            1.2,
            own,
        ),
        Target(
            "restore a file of safetensors, to safetensors.flax",
            Series(case, used, "flaxckpt safetensors"),
            1.0,
            Series(case, used, "safetensors.flax"),
        ),
        Target(
            "restore bfloat16 as float32, to load_file and astype",
            Series(case, cast, "flaxckpt"),
            1.0,
            Series(case, cast, "safetensors.flax"),
        ),
    ]


def _on_gpu() -> list[Target]:
    case, pause, step = "gpu", "pause", "step during a save"
    ways = ("flaxckpt", "flaxckpt device")
    return [
        Target(
            "pause of a GPU, to the copy to pinned memory",
            Series(case, pause, "flaxckpt"),
            1.1,
            Series(case, "copy", "to pinned memory"),
        ),
        Target(
            "pause of a GPU with a snapshot on it, seconds",
            Series(case, pause, "flaxckpt device"),
            0.01,
        ),
        *(
            Target(
                f"{step} on a GPU, {name}, to a step alone",
                Series(case, step, name),
                1.05,
                Series(case, step, "no saves"),
            )
            for name in ways
        ),
    ]


def _buckets() -> list[Target]:
    return [
        Target(
            f"{what} in a bucket, round trip {milliseconds} ms, to boto3",
            Series("buckets", f"{milliseconds} ms: {what}", "flaxckpt"),
            1.05,
            Series("buckets", f"{milliseconds} ms: {what}", "boto3"),
        )
        for milliseconds in (0, 20, 80)
        for what in ("save", "restore")
    ]


_STATE = "train_state"
_USED = "restore and use"

TARGETS: tuple[Target, ...] = (
    *_against(
        "commit",
        _STATE,
        "commit",
        "flaxckpt",
        {"orbax": 0.35, "orbax uncompressed": 1.05, "raw write": 1.12},
    ),
    *_against("blocking", _STATE, "blocking", "flaxckpt", {"orbax": 0.25}),
    *_against(
        "restore and first use",
        _STATE,
        _USED,
        "flaxckpt",
        {"orbax": 0.12, "orbax uncompressed": 0.25},
    ),
    *_against(
        "the same, unmapped",
        _STATE,
        _USED,
        "flaxckpt unmapped",
        {"orbax": 0.5, "orbax uncompressed": 1.0},
    ),
    Target(
        "params only, to all",
        Series(_STATE, "params only and use", "flaxckpt"),
        0.45,
        Series(_STATE, _USED, "flaxckpt"),
    ),
    Target("memory of a save", Series("memory", "save", "flaxckpt"), 0.05),
    Target(
        "compact: memory of a save", Series("memory", "save", "flaxckpt compact"), 0.1
    ),
    Target("memory of a restore", Series("memory", "restore", "flaxckpt"), 0.05),
    Target(
        "the same, unmapped", Series("memory", "restore", "flaxckpt unmapped"), 1.05
    ),
    *_against("compact: size", _STATE, "size", "flaxckpt compact", {"orbax": 0.96}),
    *_against("compact: commit", _STATE, "commit", "flaxckpt compact", {"orbax": 0.5}),
    *(
        target
        for leaves, limit in (("2,000 leaves", 0.04), ("20,000 leaves", 0.06))
        for way, figure in (("commit", "commit"), ("restore and first use", _USED))
        for target in _against(
            f"{leaves}: {way}",
            "tiny",
            f"{leaves}: {figure}",
            "flaxckpt",
            {"orbax": limit},
        )
    ),
    *_against(
        "open 1,000 steps", "steps", "1,000 steps: open", "flaxckpt", {"orbax": 0.2}
    ),
    *_against("stall of a save", "loop", "stall", "flaxckpt", {"orbax": 0.2}),
    *_flat_files(),
    _frozen("same arrays"),
    _frozen("equal arrays"),
    Target(
        "import, to jax, flax, optax, tensorstore",
        Series("imports", "import", "flaxckpt"),
        1.15,
        Series("imports", "import", "its dependencies"),
    ),
    *(
        Target(
            f"{verb}, CPU seconds", Series("imports", f"{verb}: CPU", "flaxckpt"), 0.5
        )
        for verb in ("ls", "du", "explain", "pin", "unpin", "prune", "show")
    ),
    Target(
        "planning 100,000 leaves, seconds",
        Series("planning", "100,000 leaves", "flaxckpt"),
        1.5,
    ),
    Target(
        "the same, to 10,000 (linear: 10)",
        Series("planning", "100,000 leaves", "flaxckpt"),
        12.0,
        Series("planning", "10,000 leaves", "flaxckpt"),
    ),
    Target(
        "restore while compiling, to one after the other",
        Series("overlap", "restore while compiling", "flaxckpt"),
        0.85,
        Series("overlap", "restore, then compile", "flaxckpt"),
    ),
    Target(
        "12 changes of mesh, bytes read to bytes needed",
        Series("reshard", "12 changes of mesh, shard_axes: read", "flaxckpt"),
        1.1,
    ),
    *(
        Target(
            f"commit of {count} processes, to one",
            Series("processes", "commit", f"{count} processes"),
            limit,
            Series("processes", "commit", "1 process"),
        )
        for count, limit in ((2, 0.8), (4, 0.9))
    ),
    Target(
        "acknowledged save of 4 processes with a directory each, to one process",
        Series("tier", "acknowledged", "4 processes"),
        1.1,
        Series("tier", "acknowledged", "1 process"),
    ),
    Target(
        "copies at peers, to local copies of the files",
        Series("tier", "copy", "4 processes"),
        1.5,
        Series("tier", "local copy", "4 processes"),
    ),
    Target(
        "a training loop with a save and its copies, to one without copies",
        Series("tier", "loop with copies", "4 processes"),
        1.05,
        Series("tier", "loop", "4 processes"),
    ),
    Target(
        "restore after the loss of one directory of four, to a restore without",
        Series("tier", "restore after loss", "4 processes"),
        1.5,
        Series("tier", "restore", "4 processes"),
    ),
    Target(
        "memory of the copies, in bytes (64 MiB)",
        Series("tier", "copy memory", "4 processes"),
        64 * 2**20,
    ),
    *_on_gpu(),
    *_buckets(),
)
