"""Many sequences in several workers, and what was found in all of them."""

import contextlib
import dataclasses
import queue
import threading

from tests.faults.process import Worker


@dataclasses.dataclass
class Result:
    """What was found in some sequences.

    Attributes:
        sequences: The number of sequences.
        cuts: The number of calls before which the power was cut.
        states: States of the disk after cuts that differ in the calls that took effect.
        checked: States that differ in what the disk held, or in what was expected.
        problems: What is wrong, with the sequence, the cut, and the lost calls.
    """

    sequences: int = 0
    cuts: int = 0
    states: int = 0
    checked: int = 0
    problems: list[str] = dataclasses.field(default_factory=list)

    def add(self, sequence, found):
        self.sequences += 1
        self.cuts += found["cuts"]
        self.states += found["states"]
        self.checked += found["checked"]
        self.problems += [f"{','.join(sequence)}: {each}" for each in found["problems"]]

    def __str__(self):
        return (
            f"{self.sequences} sequences, {self.cuts} cuts, {self.states} states,"
            f" {self.checked} of them distinct, {len(self.problems)} problems"
        )


def explore(sequences, directory, library, *, workers=1, report=lambda result: None):
    """Checks sequences in several workers.

    Args:
        sequences: Sequences of names of operations.
        directory: A directory in memory. If it was given before, states that were
            checked then are not checked again.
        library: The shim, as `shim.build` makes it.
        workers: The number of workers.
        report: Called with the result after each sequence.
    """
    waiting = queue.SimpleQueue()
    for sequence in sequences:
        waiting.put(sequence)
    result, lock = Result(), threading.Lock()
    base, seen = directory / "base", directory / "seen"
    seen.mkdir(exist_ok=True)

    def work(worker):
        with contextlib.suppress(queue.Empty):
            while True:
                sequence = waiting.get_nowait()
                found = worker("explore", base=base, seen=seen, sequence=sequence)
                with lock:
                    result.add(sequence, found)
                    report(result)

    with contextlib.ExitStack() as stack:
        errors = stack.enter_context((directory / "errors").open("w+"))
        started = [
            Worker(library, errors, "verification.sequences.worker")
            for _ in range(workers)
        ]
        for worker in started:
            stack.callback(worker.close)
        if not base.exists():
            assert started[0]("prepare", base=base)["code"] == 0
        threads = [threading.Thread(target=work, args=(each,)) for each in started]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        errors.seek(0)
        if result.problems and (told := errors.read()[-5000:]):
            result.problems.append(f"the workers' standard error:\n{told}")
    return result
