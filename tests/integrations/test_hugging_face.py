"""Hugging Face's IterableDataset resumes exactly, but for what it loses itself."""

import numpy as np
import pytest

from flaxckpt import datasets, errors
from flaxckpt.datasets import Buffered
from tests.helpers.dataset_runs import assert_resumes

hf = pytest.importorskip("datasets", reason="datasets is not installed")

SIZE, SHARDS = 48, 4


def rows():
    return hf.Dataset.from_dict({"x": list(range(SIZE))})


def stream():
    return rows().to_iterable_dataset(num_shards=SHARDS)


def shards_shuffled():
    return stream().shuffle(seed=5, buffer_size=1)


def mapped():
    return shards_shuffled().map(lambda row: {"y": 2 * row["x"]}).batch(4)


def begin(dataset, epoch):
    inner = dataset.iterator if isinstance(dataset, Buffered) else dataset
    if inner.epoch != epoch:
        inner.set_epoch(epoch)


KINDS = {
    "stream": (stream, SIZE),
    "shards shuffled": (shards_shuffled, SIZE),
    "mapped and batched": (mapped, SIZE // 4),
    "buffered": (lambda: Buffered(shards_shuffled(), depth=5), SIZE),
}


@pytest.mark.parametrize(("make", "size"), KINDS.values(), ids=KINDS)
def test_dataset_resumes_exactly_in_every_epoch(tmp_path, make, size):
    counts = [1, size // 2, size - 1, size, size + 1, size + size // 2, 2 * size]
    assert_resumes(tmp_path, make, counts, epochs=2, epoch_size=size, begin=begin)


def test_restores_epoch_before_state():
    used, fresh = shards_shuffled(), shards_shuffled()
    used.set_epoch(3)
    batches = iter(used)
    for _ in range(7):
        next(batches)
    datasets.set_state(fresh, datasets.state_files(used), path="run/1")
    assert fresh.epoch == 3
    assert list(fresh) == list(batches)


def test_returns_restored_state_before_first_batch():
    used, fresh = stream(), stream()
    next(iter(used))
    files = datasets.state_files(used)
    datasets.set_state(fresh, files, path="run/1")
    assert datasets.state_files(fresh) == files


def test_rejecting_state_of_other_pipeline_changes_nothing():
    used, fresh = stream(), mapped()
    used.set_epoch(1)
    next(iter(used))
    with pytest.raises(errors.DatasetStateError, match="does not accept"):
        datasets.set_state(fresh, datasets.state_files(used), path="run/1")
    assert fresh.epoch == 0
    assert list(fresh) == list(mapped())


def test_warns_once_about_shuffle_buffer(caplog):
    shuffled = stream().shuffle(seed=5, buffer_size=16).map(lambda row: row)
    for _ in range(3):
        datasets.state_files(shuffled)
    warnings = [r for r in caplog.records if r.name.startswith("flaxckpt")]
    assert len(warnings) == 1
    assert "shuffles in a buffer" in warnings[0].getMessage()


@pytest.mark.parametrize("make", [stream, shards_shuffled])
def test_does_not_warn_without_shuffle_buffer(caplog, make):
    datasets.state_files(make().map(lambda row: row))
    assert not caplog.records


def test_warns_about_restore_into_started_loop(caplog):
    used, begun = stream(), stream()
    next(iter(used))
    files = datasets.state_files(used)
    for _ in range(2):
        datasets.set_state(begun, files, path="run/1")
    assert not caplog.records
    taken = iter(begun)
    next(taken)
    datasets.set_state(begun, files, path="run/1")
    assert "call iter() on it again" in caplog.text
    assert next(iter(begun)) == {"x": 1}


@pytest.mark.parametrize(
    ("make", "hint"),
    [
        (rows, "to_iterable_dataset"),
        (lambda: hf.DatasetDict({"train": rows()}), "splits"),
        (lambda: iter(stream()), "Pass the dataset itself"),
        (lambda: advanced(iter(stream())), "Pass the dataset itself"),
    ],
    ids=["Dataset", "DatasetDict", "iter", "iter that has begun"],
)
def test_error_names_the_stateful_alternative(make, hint):
    with pytest.raises(errors.DatasetStateError, match=hint):
        datasets.state_files(make())


def advanced(iterator):
    next(iterator)
    return iterator


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")
def test_torchdata_loader_restores_epoch():
    stateful = pytest.importorskip(
        "torchdata.stateful_dataloader", reason="torchdata is not installed"
    )

    def make():
        data = shards_shuffled().with_format("torch")
        return stateful.StatefulDataLoader(data, batch_size=4)

    used, fresh = make(), make()
    used.dataset.set_epoch(2)
    batches = iter(used)
    for _ in range(3):
        next(batches)
    datasets.set_state(fresh, datasets.state_files(used), path="run/1")
    np.testing.assert_equal(
        [batch["x"].tolist() for batch in fresh],
        [batch["x"].tolist() for batch in batches],
    )
