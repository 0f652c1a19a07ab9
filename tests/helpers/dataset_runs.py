"""What the tests of dataset iterators share: runs that are cut off and resumed."""

import itertools

import numpy as np

import flaxckpt


def plain(batch):
    """A batch of any framework as dicts, lists and numpy arrays."""
    if isinstance(batch, dict):
        return {key: plain(value) for key, value in batch.items()}
    if isinstance(batch, list | tuple):
        return [plain(value) for value in batch]
    return batch.numpy() if hasattr(batch, "numpy") else np.array(batch)


def assert_resumes(directory, make, counts, *, epochs=1, epoch_size=0, begin=None):
    """A run that is resumed after some batches gives all that were left, and no other.

    Args:
        directory: For one checkpoint per count.
        make: Makes the iterator or loader that is saved, the same each time.
        counts: After how many batches a run is cut off.
        epochs: How often a loader is iterated over.
        epoch_size: How many batches that gives each time.
        begin: What a loop calls at the beginning of an epoch: `begin(dataset, epoch)`.
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
        found = [plain(batch) for batch in run(fresh, epoch, epochs, begin)]
        np.testing.assert_equal(found, straight[count:], f"after {count} batches")


def run(dataset, epoch, epochs, begin):
    """The batches of the epochs from `epoch` on, of which the first may have begun."""
    for number in range(epoch, epochs):
        if begin is not None:
            begin(dataset, number)
        yield from dataset
