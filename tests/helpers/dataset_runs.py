"""Interrupted and resumed runs, for the tests of dataset iterators."""

import itertools

import numpy as np

import flaxckpt


def plain(batch):
    """Converts a batch of any framework to dicts, lists and numpy arrays."""
    if isinstance(batch, dict):
        return {key: plain(value) for key, value in batch.items()}
    if isinstance(batch, list | tuple):
        return [plain(value) for value in batch]
    return batch.numpy() if hasattr(batch, "numpy") else np.array(batch)


def assert_resumes(directory, make, counts, *, epochs=1, epoch_size=0, begin=None):
    """Asserts that resumed runs yield exactly the remaining batches.

    Args:
        directory: A directory for one checkpoint per count.
        make: Creates the iterator or loader to save, the same each time.
        counts: The numbers of batches after which a run is interrupted.
        epochs: The number of times that a loader is iterated over.
        epoch_size: The number of batches of an epoch.
        begin: A function that a loop calls at the start of an epoch:
            `begin(dataset, epoch)`.
    """
    straight = [plain(batch) for batch in run(make(), 0, epochs, begin)]
    assert len(straight) >= max(counts) > 0
    for count in counts:
        used = make()
        loop = run(used, 0, epochs, begin)
        for _ in itertools.islice(loop, count):
            pass
        fresh = make()
        with flaxckpt.Checkpointer(directory / f"{count}") as ckpt:
            ckpt.save(count, {"step": count}, dataset=used)
            ckpt.restore({"step": 0}, dataset=fresh)
        epoch = (count - 1) // epoch_size if epoch_size and count else 0
        resumed = [plain(batch) for batch in run(fresh, epoch, epochs, begin)]
        np.testing.assert_equal(resumed, straight[count:], f"after {count} batches")


def run(dataset, epoch, epochs, begin):
    """Yields the batches of the epochs from `epoch`, which may have started."""
    for number in range(epoch, epochs):
        if begin is not None:
            begin(dataset, number)
        yield from dataset
