"""Operations in which one allocation after another fails, in several workers."""

import collections
import contextlib
import dataclasses
import itertools
import threading

from tests.faults.process import Worker
from verification.oom import shim

OPERATIONS = (
    "FirstSave",
    "Retention",
    "Overwrite",
    "Delete",
    "AddMetrics",
    "Pins",
    "Reads",
    "ReadsMapped",
    "Verifies",
)
KINDS = {
    "Python": {"kinds": shim.PYTHON},
    "numpy": {"kinds": shim.NUMPY},
    "all of numpy": {"kinds": shim.NUMPY, "count": shim.FOREVER},
    "maps": {"kinds": shim.MAPS},
    "all maps": {"kinds": shim.MAPS, "count": shim.FOREVER},
    "threads": {"kinds": shim.THREADS},
    "all threads": {"kinds": shim.THREADS, "count": shim.FOREVER},
    "all from 64 KiB": {
        "kinds": shim.EVERYTHING - shim.THREADS,
        "count": shim.FOREVER,
        "smallest": 2**16,
    },
}


@dataclasses.dataclass
class Result:
    """What came of failing allocations.

    Attributes:
        outcomes: Operation, kind and outcome -> the number of failing allocations.
        strange: Errors neither of flaxckpt nor MemoryError, as Python and numpy raise
            them when they lack memory, and deaths in other libraries.
        problems: What is wrong, with the operation, the kind and the number.
    """

    outcomes: collections.Counter = dataclasses.field(
        default_factory=collections.Counter
    )
    strange: list[str] = dataclasses.field(default_factory=list)
    problems: list[str] = dataclasses.field(default_factory=list)

    def add(self, operation, kind, at, done):
        outcome = done["outcome"].partition(":")[0]
        self.outcomes[operation, kind, outcome] += 1
        where = f"{operation}, {kind}, allocation {at}"
        self.problems += [f"{where}: {problem}" for problem in done["problems"]]
        if outcome in ("unexpected", "died"):
            self.strange.append(f"{where}: {done['code']}, {done['outcome']}")
        if done["code"] == "hang":
            self.problems.append(f"{where}: it hangs")

    def by_outcome(self):
        counts = collections.Counter()
        for (*_, outcome), count in self.outcomes.items():
            counts[outcome] += count
        return counts

    def __str__(self):
        counts = ", ".join(
            f"{count} {outcome}" for outcome, count in self.by_outcome().most_common()
        )
        return f"{counts}; {len(self.problems)} problems"


def explore(
    operations,
    directory,
    library,
    *,
    workers=1,
    first=1,
    every=1,
    every_other=1,
    report=lambda result: None,
):
    """Has every allocation of some operations fail, until there are no more.

    Args:
        operations: Names of scenarios.
        directory: A new directory in memory.
        library: The shim, as `shim.build` makes it.
        workers: The number of workers.
        first: The first allocation of Python that fails.
        every: Of Python's allocations, every so many fail.
        every_other: Of the others, every so many.
        report: Called with the result after each allocation.
    """
    result, lock = Result(), threading.Lock()

    def fail_all(worker, operation, part):
        base = directory / f"base-{operation}-{part}"
        seen = directory / "seen"
        assert worker("prepare", scenario=operation, base=base)["code"] == 0
        for kind, fault in KINDS.items():
            is_python = kind == "Python"
            step = every if is_python else every_other
            start = (first if is_python else 1) + part * step
            for at in itertools.count(start, step * workers):
                done = worker(
                    "run",
                    scenario=operation,
                    base=base,
                    work=directory / f"work-{part}",
                    seen=seen,
                    at=at,
                    **fault,
                )
                if not done["hits"] and done["code"] == 0:
                    break
                with lock:
                    result.add(operation, kind, at, done)
                    report(result)

    (directory / "seen").mkdir()
    with contextlib.ExitStack() as stack:
        errors = stack.enter_context((directory / "errors").open("w"))
        threads = []
        for part in range(workers):
            worker = Worker(library, errors, "verification.oom.worker")
            stack.callback(worker.close)

            def work(worker=worker, part=part):
                for operation in operations:
                    fail_all(worker, operation, part)

            threads.append(threading.Thread(target=work))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return result
