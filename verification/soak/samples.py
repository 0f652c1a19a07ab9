"""What a process holds, sampled again and again, and whether it grows."""

import gc
import itertools
import os
import threading
import tracemalloc
from pathlib import Path

import jax
import numpy as np

WARM_UP = 0.3
"""The part of all samples at the beginning that does not count."""

MIB = 2**20
_PROC = Path("/proc/self")

GROWTH = {"rss_mib": 24.0, "python_mib": 6.0, "live_arrays": 8, "objects": 20_000}
"""Name -> how much it may grow, by the slope, from the warm-up to the end."""

NO_MORE = ("threads", "descriptors", "children", "files")
"""What may not be more at the end than it was between warm-up and the middle."""

FILLS = {"tasks": 2}
"""Name -> how much it may grow from each quarter after the warm-up to the next.

Native threads are also those of TensorStore's pool, which starts one when all are busy
and ends it after some seconds without work: it fills up, and empties, at any time, but
does not grow in each quarter. A thread that is lost in each epoch does.
"""

FEWEST = 8
"""With fewer samples after the warm-up, a pool that fills up looks like a leak."""


def take():
    """Returns what this process holds, after a collection of garbage."""
    gc.collect()
    pages = int((_PROC / "statm").read_text(encoding="ascii").split()[1])
    resident = pages * os.sysconf("SC_PAGESIZE")
    return {
        "rss_mib": resident / MIB,
        "python_mib": tracemalloc.get_traced_memory()[0] / MIB,
        "objects": len(gc.get_objects()),
        "live_arrays": len(jax.live_arrays()),
        "threads": threading.active_count(),
        "tasks": _count("task"),
        "descriptors": _count("fd"),
        "children": _children(),
    }


def _count(name):
    return sum(1 for _ in (_PROC / name).iterdir())


def _children():
    children = _PROC / "task" / str(os.getpid()) / "children"
    return len(children.read_text(encoding="ascii").split())


def growth(samples, name):
    """Returns how much a value grows from the warm-up to the end, by its slope."""
    values = [sample[name] for sample in _counted(samples)]
    return float(np.polyfit(np.arange(len(values)), values, 1)[0]) * (len(values) - 1)


def problems(samples):
    """Returns a line for each value that grows; none for too few samples to tell."""
    counted = _counted(samples)
    if len(counted) < FEWEST:
        return []
    found = []
    for name, most in GROWTH.items():
        if name in samples[0] and (grown := growth(samples, name)) > most:
            found.append(f"{name} grows by {grown:.4g}, wanted at most {most:g}")
    for name, most in FILLS.items():
        if name not in samples[0]:
            continue
        quarters = [min(sample[name] for sample in part) for part in _split(counted, 4)]
        if all(later - most > early for early, later in itertools.pairwise(quarters)):
            found.append(f"{name}: {quarters} or more in the quarters after warm-up")
    half = len(counted) // 2
    for name in NO_MORE:
        if name not in samples[0]:
            continue
        early = max(sample[name] for sample in counted[:half])
        late = min(sample[name] for sample in counted[half:])
        if late > early:
            found.append(f"{name}: {early} before the middle, {late} or more after it")
    return found


def _split(samples, count):
    bounds = [len(samples) * number // count for number in range(count + 1)]
    return [samples[begin:end] for begin, end in itertools.pairwise(bounds)]


def _counted(samples):
    return samples[int(len(samples) * WARM_UP) :]
