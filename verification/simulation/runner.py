"""Runs many histories, on all cores, and prints those that break a guarantee."""

import concurrent.futures
import contextlib
import gc
import importlib
import logging
import multiprocessing
import os
import sys
import time
from collections.abc import Iterator
from types import ModuleType
from typing import TextIO

from verification.simulation import kernel, stand_ins

KINDS = ("buckets", "runs", "files", "pauses", "pins", "jobs", "failures", "tier")
"""Modules with a function `history`."""

SLOWNESS = {"tier": 20}
"""Kind -> how many times as long its histories take, so that as many fewer run."""

_SHARD = 100
_LINES = 100
"""Lines of a timeline that are printed."""


@contextlib.contextmanager
def installed(histories: ModuleType, patches: dict | None = None) -> Iterator[None]:
    """Gives flaxckpt's modules the stand-ins that the histories need.

    Args:
        histories: A module with a function `history`, and perhaps with `PATCHES` and
            the context managers `CONTEXTS`.
        patches: Further attributes to replace, for example by planted faults.
    """
    log = logging.getLogger("flaxckpt")
    level, was_enabled = log.level, gc.isenabled()
    patches = {**getattr(histories, "PATCHES", {}), **(patches or {})}
    with contextlib.ExitStack() as stack:
        for enter in getattr(histories, "CONTEXTS", ()):
            stack.enter_context(enter())
        stack.enter_context(stand_ins.installed(patches=patches))
        log.setLevel(logging.CRITICAL)
        gc.disable()  # garbage of greenlets is ended where it can do nothing
        try:
            yield
        finally:
            log.setLevel(level)
            if was_enabled:
                gc.enable()


def find_violations(
    histories: ModuleType, seeds: range, patches: dict | None = None
) -> Iterator[tuple[int, kernel.Violation]]:
    """Yields the seeds of histories that break a guarantee, and how."""
    with installed(histories, patches):
        for seed in seeds:
            try:
                histories.history(seed)
            except kernel.Violation as violation:
                yield seed, violation
            if seed % 200 == 0:
                gc.collect()


def _run_shard(kind: str, seeds: range) -> list[tuple[int, str]]:
    histories = importlib.import_module(f"verification.simulation.{kind}")
    return [(seed, str(error)) for seed, error in find_violations(histories, seeds)]


def print_timeline(kind: str, seed: int, out: TextIO = sys.stdout) -> None:
    """Prints the end of the timeline of a history that breaks a guarantee."""
    histories = importlib.import_module(f"verification.simulation.{kind}")
    with installed(histories):
        try:
            lines = histories.history(seed, is_traced=True)
        except kernel.Violation as violation:
            lines = [*violation.timeline, f"Violation: {violation}"]
    skipped = max(0, len(lines) - _LINES)
    if skipped:
        out.write(f"… {skipped} earlier lines\n")
    out.writelines(f"{line}\n" for line in lines[skipped:])


def run(kind: str, first: int, count: int, out: TextIO = sys.stdout) -> int:
    """Runs `count` histories of a kind; returns how many break a guarantee."""
    shards = [
        range(start, min(start + _SHARD, first + count))
        for start in range(first, first + count, _SHARD)
    ]
    begin, done = time.monotonic(), 0
    found: list[tuple[int, str]] = []
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(
        os.cpu_count(), mp_context=context
    ) as pool:
        running = {pool.submit(_run_shard, kind, seeds): seeds for seeds in shards}
        for future in concurrent.futures.as_completed(running):
            done += len(running[future])
            for seed, error in future.result():
                found.append((seed, error))
                out.write(f"{kind} {seed}: {error}\n")
                out.flush()
    secs = time.monotonic() - begin
    out.write(f"{kind}: {done} histories in {secs:.0f} s, {len(found)} violations\n")
    for seed, _ in sorted(found)[:3]:
        out.write(f"\nThe timeline of {kind} {seed}:\n")
        print_timeline(kind, seed, out)
    return len(found)
