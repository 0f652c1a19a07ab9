"""tf.data's iterators resume exactly, shuffle buffers and all; so do clu's."""

import os

import pytest

from flaxckpt import datasets, errors
from flaxckpt.datasets import Buffered
from tests.helpers.dataset_runs import assert_resumes

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
tf = pytest.importorskip("tensorflow", reason="tensorflow is not installed")

from clu.data import dataset_iterator  # noqa: E402

COUNTS = [1, 7, 15, 16, 29]  # of 30 batches: two epochs of 15


def pipeline():
    data = tf.data.Dataset.range(60).shuffle(32, seed=2).repeat(2)
    return data.map(lambda x: {"x": x}).batch(4).prefetch(2)


KINDS = {
    "iter": lambda: iter(pipeline()),
    "numpy": lambda: pipeline().as_numpy_iterator(),
    "clu": lambda: dataset_iterator.TfDatasetIterator(pipeline(), checkpoint=True),
    "clu, peekable": lambda: dataset_iterator.PeekableDatasetIterator(
        dataset_iterator.TfDatasetIterator(pipeline(), checkpoint=True)
    ),
    "buffered": lambda: Buffered(pipeline().as_numpy_iterator(), depth=3),
}


@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)
def test_iterator_resumes_exactly(tmp_path, make):
    assert_resumes(tmp_path, make, COUNTS)


def test_rejects_python_in_pipeline_with_reason():
    data = tf.data.Dataset.from_generator(lambda: iter([1, 2]), output_types=tf.int32)
    with pytest.raises(errors.DatasetStateError, match="from_generator"):
        datasets.state_files(iter(data))


def test_rejects_state_of_other_pipeline():
    files = datasets.state_files(iter(tf.data.Dataset.range(3)))
    other = tf.data.Dataset.range(9).shuffle(4).as_numpy_iterator()
    with pytest.raises(errors.DatasetStateError, match="does not accept"):
        datasets.set_state(other, files, path="run/1")


def test_rejects_dataset_instead_of_iterator():
    with pytest.raises(errors.DatasetStateError, match="as_numpy_iterator"):
        datasets.state_files(pipeline())


def test_rejects_clu_iterator_without_checkpoints():
    batches = dataset_iterator.TfDatasetIterator(pipeline(), checkpoint=False)
    with pytest.raises(errors.DatasetStateError, match="checkpoint=True"):
        datasets.state_files(batches)


def test_state_records_tensorflow_version():
    files = datasets.state_files(iter(pipeline()))
    assert f'"version": "{tf.__version__}"'.encode() in files["metadata"]
