"""Every kind of grain's iterators resumes exactly, wherever it is cut off."""

import grain
import numpy as np
import pytest
from absl import flags

import flaxckpt
from flaxckpt import datasets, errors
from flaxckpt.datasets import Buffered
from tests.helpers.dataset_runs import assert_resumes

SIZE = 60
COUNTS = [1, 7, 15, 16, 29]  # of 30 batches: two epochs of 15


@pytest.fixture(autouse=True, scope="module")
def flags_are_parsed():
    """Without this, grain's worker processes refuse to start."""
    if not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()


class Doubled(grain.transforms.Map):
    def map(self, element):
        return 2 * element


class Noisy(grain.transforms.RandomMap):
    def random_map(self, element, rng):
        return element + rng.integers(1000)


def source():
    return grain.MapDataset.range(SIZE).seed(3).shuffle().random_map(Noisy())


def batched():
    return source().repeat(2).batch(4).to_iter_dataset()


def filtered():
    data = source().repeat(2).to_iter_dataset()
    return data.filter(lambda x: x % 3).batch(4)


def mixed():
    return grain.MapDataset.mix([source(), source().map(Doubled())]).to_iter_dataset()


def windows():
    return grain.experimental.WindowShuffleIterDataset(batched(), window_size=5, seed=1)


def threads():
    return grain.experimental.ThreadPrefetchIterDataset(
        batched(), prefetch_buffer_size=3
    )


def elastic():
    data = source().repeat(2)
    return grain.experimental.ElasticIterator(data, 4, grain.sharding.NoSharding())


def loader(worker_count=0):
    return grain.DataLoader(
        data_source=range(SIZE),
        sampler=grain.samplers.IndexSampler(
            num_records=SIZE, shuffle=True, seed=1, num_epochs=2
        ),
        operations=[Doubled(), grain.transforms.Batch(4)],
        worker_count=worker_count,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "make", [batched, filtered, mixed, windows, threads, elastic, loader]
)
def test_iterator_resumes_exactly(tmp_path, make):
    counts = [n for n in COUNTS if n < len(list(make()))]
    assert len(counts) > 1
    assert_resumes(tmp_path, lambda: iter(make()), counts)


@pytest.mark.slow
def test_loader_with_worker_processes_resumes_exactly(tmp_path):
    assert_resumes(tmp_path, lambda: iter(loader(worker_count=2)), [3, 16])


@pytest.mark.slow
def test_prefetching_processes_resume_exactly(tmp_path):
    options = grain.multiprocessing.MultiprocessingOptions(num_workers=2)
    assert_resumes(tmp_path, lambda: iter(batched().mp_prefetch(options)), [16])


def test_buffer_around_prefetching_thread_resumes_exactly(tmp_path):
    assert_resumes(tmp_path, lambda: Buffered(iter(threads())), COUNTS)


def test_error_explains_different_number_of_workers():
    used = iter(loader(worker_count=0))
    next(used)
    fresh = iter(loader(worker_count=1))
    with pytest.raises(errors.DatasetStateError, match="as many workers") as info:
        datasets.set_state(fresh, datasets.state_files(used), path="run/1")
    assert isinstance(info.value.__cause__, ValueError)


def test_rejects_loader_over_other_data():
    files = datasets.state_files(iter(loader()))
    other = grain.DataLoader(
        data_source=range(SIZE + 1),
        sampler=grain.samplers.IndexSampler(num_records=SIZE + 1, seed=1),
    )
    with pytest.raises(errors.DatasetStateError, match="does not match"):
        datasets.set_state(iter(other), files, path="run/1")


@pytest.mark.parametrize("make", [source, batched, loader])
def test_state_files_rejects_grain_objects_without_iter(make):
    with pytest.raises(errors.DatasetStateError, match=r"Pass iter\(x\) instead of"):
        datasets.state_files(make())


def test_position_counts_batches():
    batches = iter(batched())
    for taken in range(4):
        assert datasets.position(batches) == taken
        next(batches)
    assert datasets.position(iter(loader())) is None
    assert datasets.position(np.arange(3)) is None


def filtered_elements():
    """Drops elements before they become batches, most of them at the beginning."""
    elements = grain.MapDataset.range(SIZE).filter(lambda x: x > 9 or x % 3 == 0)
    return elements.to_iter_dataset().batch(4)


@pytest.mark.parametrize("make", [filtered, filtered_elements])
@pytest.mark.parametrize("steps", [3, 7])
def test_filter_is_not_mistaken_for_prefetching(tmp_path, caplog, make, steps):
    batches = iter(make())
    with flaxckpt.Checkpointer(tmp_path) as ckpt:
        callback = flaxckpt.CheckpointCallback(ckpt, every_steps=2, dataset=batches)
        callback.restore_or_init({"n": 0})
        for step in range(1, steps + 1):
            callback(step, {"n": np.asarray(next(batches))})
    assert "batches" not in caplog.text
