"""Measures the memory of one save or restore in a separate process.

`python -m benchmarks.memory CONTENDER save|restore DIRECTORY` prints the peak of
anonymous memory as a fraction of the state. A restore needs the directory of a save.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import jax

from benchmarks import contenders, states
from benchmarks.contenders import Session

STATUS = Path("/proc/self/status")
"""The memory of this process, on Linux."""

_POLL_SECS = 0.001


def main() -> None:
    """Measures one action, as given on the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("contender", choices=contenders.CONTENDERS)
    parser.add_argument("action", choices=("save", "restore"))
    parser.add_argument("directory", type=Path)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()

    def session_in(name: str) -> Session:
        directory = options.directory / name
        directory.mkdir(exist_ok=True)
        return contenders.CONTENDERS[options.contender].open(directory)

    _warm_up(session_in(f"warm-up-{options.action}"))
    abstract_state = states.on(
        jax.devices("cpu")[0], states.train_state(quick=options.quick)
    )
    session = session_in("measured")
    if options.action == "save":
        state = states.copy(states.fill(abstract_state))
        with extra_memory() as extra:
            session.save(1, state)
            session.wait()
    else:
        with extra_memory() as extra:
            restored = jax.block_until_ready(session.restore(1, abstract_state))
            states.use(restored)
    session.close()
    print(extra[0] / states.nbytes(abstract_state))


def _warm_up(session: Session) -> None:
    """Imports everything and starts all threads, with a tiny state."""
    abstract_state = states.on(jax.devices("cpu")[0], states.train_state(quick=True))
    session.save(1, states.fill(abstract_state))
    session.wait()
    states.use(session.restore(1, abstract_state))
    session.close()


@contextmanager
def extra_memory() -> Iterator[list[int]]:
    """Yields a list that gets one number at the end: the peak of additional bytes."""
    _release_free_memory()
    status = os.open(STATUS, os.O_RDONLY)
    before = peak = _anonymous_bytes(status)
    extra: list[int] = []
    is_over = threading.Event()

    def watch() -> None:
        nonlocal peak
        while not is_over.is_set():
            peak = max(peak, _anonymous_bytes(status))
            time.sleep(_POLL_SECS)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield extra
    finally:
        is_over.set()
        watcher.join()
        extra.append(max(peak, _anonymous_bytes(status)) - before)
        os.close(status)


def resident_bytes() -> int:
    """Returns the memory of this process in bytes, pinned memory included; else 0."""
    if not STATUS.exists():
        return 0
    return int(STATUS.read_text().split("VmRSS:")[1].split()[0]) * 1024


def _anonymous_bytes(status: int) -> int:
    text = os.pread(status, 4096, 0)
    return int(text.split(b"RssAnon:")[1].split()[0]) * 1024


def _release_free_memory() -> None:
    """Returns free memory of the allocator to the system, so that its reuse counts."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)


if __name__ == "__main__":
    main()
