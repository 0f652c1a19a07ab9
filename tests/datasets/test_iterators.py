"""Iterators continue exactly where they stood, or say why they cannot."""

import json
from pathlib import Path

import flax.jax_utils
import grain
import jax
import numpy as np
import pytest
from clu.data import dataset_iterator

import flaxckpt
from flaxckpt import datasets, errors
from flaxckpt.datasets import StepIndexed


def resumed(tmp_path, make, taken=5):
    """What a fresh iterator gives after the state of an advanced one is restored."""
    iterator = make()
    for _ in range(taken):
        next(iterator)
    with flaxckpt.Checkpointer(tmp_path / "run") as ckpt:
        ckpt.save(taken, {"step": taken}, dataset=iterator)
        wanted = [next(iterator) for _ in range(5)]
        fresh = make()
        next(fresh)
        ckpt.restore({"step": 0}, dataset=fresh)
    return wanted, [next(fresh) for _ in range(5)]


def assert_resumes(tmp_path, make, taken=5):
    wanted, found = resumed(tmp_path, make, taken)
    np.testing.assert_equal(found, wanted)


def grain_dataset():
    source = grain.MapDataset.range(1000).seed(3).shuffle().repeat()
    return iter(source.to_iter_dataset().filter(lambda x: x % 3).batch(4))


def grain_loader():
    sampler = grain.samplers.IndexSampler(
        num_records=1000, shuffle=True, seed=1, num_epochs=2
    )
    loader = grain.DataLoader(
        data_source=range(1000), sampler=sampler, operations=[grain.transforms.Batch(4)]
    )
    return iter(loader)


class Everything:
    """Keeps every type that a state may hold."""

    def __init__(self):
        self.rng = np.random.default_rng(0)
        self.seen = []

    def __next__(self):
        self.seen.append(int(self.rng.integers(100)))
        return self.seen[-1]

    def get_state(self):
        return {
            "rng": self.rng.bit_generator.state,
            "seen": np.array(self.seen),
            "raw": bytes(self.seen),
            "pair": (len(self.seen), None),
        }

    def set_state(self, state):
        assert state["pair"] == (len(state["seen"]), None)
        assert state["raw"] == bytes(state["seen"].tolist())
        self.rng.bit_generator.state = state["rng"]
        self.seen = state["seen"].tolist()


class Opaque:
    """Keeps bytes that are no text."""

    def __init__(self):
        self.n = 0

    def __next__(self):
        self.n += 1
        return self.n

    def get_state(self):
        return b"\x00\xff" + bytes([self.n])

    def set_state(self, state):
        assert state[:2] == b"\x00\xff"
        self.n = state[2]


class StateDict:
    """The protocol of torchdata and Hugging Face."""

    def __init__(self):
        self.n = 0

    def __next__(self):
        self.n += 1
        return self.n

    def state_dict(self):
        return {"n": self.n}

    def load_state_dict(self, state):
        self.n = state["n"]


class CluIterator(dataset_iterator.DatasetIterator):
    """clu's protocol: files, which only the iterator itself can read."""

    def __init__(self):
        self.n = 0

    def __next__(self):
        self.n += 1
        return self.n

    def reset(self):
        self.n = 0

    @property
    def element_spec(self):
        return {}

    def save(self, filename):
        Path(f"{filename}.index").write_text(str(self.n))

    def restore(self, filename):
        self.n = int(Path(f"{filename}.index").read_text())


@pytest.mark.parametrize(
    "make",
    [
        grain_dataset,
        grain_loader,
        Everything,
        Opaque,
        StateDict,
        CluIterator,
        lambda: StepIndexed(lambda i: i * i, start=3),
    ],
    ids=[
        *("grain", "grain loader", "all types", "bytes", "state_dict", "clu"),
        "StepIndexed",
    ],
)
def test_iterator_resumes_at_saved_position(tmp_path, make):
    assert_resumes(tmp_path, make)


@pytest.mark.parametrize("index", [-1, "3", 1.5, True, None, np.float64(2)])
def test_step_indexed_accepts_only_whole_numbers(index):
    batches = StepIndexed(lambda i: i)
    with pytest.raises(errors.DatasetStateError, match="whole number from 0"):
        batches.set_state({"next_index": index})
    with pytest.raises(errors.OptionError, match="start must be"):
        StepIndexed(lambda i: i, start=index)
    for state in ({}, 3, None, [("next_index", 3)]):
        with pytest.raises(errors.DatasetStateError, match="next_index") as info:
            batches.set_state(state)
        assert "or dataset=None" in str(info.value)
    assert next(batches) == 0
    batches.set_state({"next_index": np.int64(3)})
    assert next(batches) == 3


def test_saves_iterator_state_as_of_call(tmp_path):
    iterator = StepIndexed(lambda i: i)
    with flaxckpt.Checkpointer(tmp_path) as ckpt:
        ckpt.save(0, {"x": np.zeros((512, 512))}, dataset=iterator)
        for _ in range(100):
            next(iterator)
        ckpt.wait()
        ckpt.restore(dataset=iterator)
        assert next(iterator) == 0
        assert ckpt.metadata(0).has_dataset


def test_stores_grain_state_in_grain_format(tmp_path):
    iterator = grain_dataset()
    next(iterator)
    with flaxckpt.Checkpointer(tmp_path) as ckpt:
        ckpt.save(1, {"x": 1}, dataset=iterator)
        wanted = json.dumps(iterator.get_state(), indent=4)
    assert (tmp_path / "1/dataset/process_0-of-1.json").read_text() == wanted
    loader = grain_loader()
    files = datasets.state_files(loader)
    assert files["process_0-of-1.json"] == loader.get_state()


def prefetched():
    devices = jax.local_devices()
    return flax.jax_utils.prefetch_to_device(iter([np.ones((len(devices), 1))]), 1)


@pytest.mark.parametrize(
    ("make", "hint"),
    [
        (lambda: iter([1, 2]), "StepIndexed"),
        (lambda: (i for i in range(3)), "get_state"),
        (lambda: StepIndexed, "pass an object of it"),
        (lambda: grain.MapDataset.range(3), r"iter\(x\)"),
        (prefetched, r"Buffered\(iterator"),
    ],
    ids=["list", "generator", "class", "grain dataset", "flax's prefetcher"],
)
def test_rejects_iterator_without_state_immediately(tmp_path, make, hint):
    with flaxckpt.Checkpointer(tmp_path) as ckpt:
        with pytest.raises(errors.DatasetStateError, match=hint) as info:
            ckpt.save(1, {"x": 1}, dataset=make())
        assert isinstance(info.value, TypeError)
        assert len(str(info.value).splitlines()) < 15
    assert ckpt.steps() == []


def test_error_names_iterator_failing_to_give_state(tmp_path):
    class Closed(StepIndexed):
        def get_state(self):
            raise ValueError("iterator is closed")

    with flaxckpt.Checkpointer(tmp_path) as ckpt:
        with pytest.raises(
            errors.DatasetStateError, match=r"Closed.*is closed"
        ) as info:
            ckpt.save(1, {"x": 1}, dataset=Closed(lambda i: i))
        assert isinstance(info.value.__cause__, ValueError)
        assert ckpt.steps() == []


class Peekable(dataset_iterator.PeekableDatasetIterator):
    """clu's own, over an iterator that needs no TensorFlow."""

    def __init__(self):
        super().__init__(CluIterator())


def test_peeked_batch_is_not_lost(tmp_path):
    assert_resumes(tmp_path, Peekable)
    batches = Peekable()
    assert [next(batches), batches.peek()] == [1, 2]
    with pytest.raises(errors.DatasetStateError, match="peeked"):
        datasets.state_files(batches)
    assert next(batches) == 2
    files = datasets.state_files(batches)
    assert [next(batches), batches.peek()] == [3, 4]
    datasets.set_state(batches, files, path=tmp_path)
    assert [next(batches), next(batches)] == [3, 4]
    batches.peek_async()
    with pytest.raises(errors.DatasetStateError, match="peeked"):
        datasets.state_files(batches)


def test_rejects_clu_iterator_without_checkpoint():
    class Forgetful(CluIterator):
        def save(self, filename):
            pass

    with pytest.raises(errors.DatasetStateError, match="checkpoint=True"):
        datasets.state_files(Forgetful())


def test_warns_about_other_library_version(caplog):
    batches = grain_dataset()
    files = datasets.state_files(batches)
    datasets.set_state(batches, files, path="run/1")
    assert not caplog.records
    description = json.loads(files["metadata"])
    assert description["version"]
    files["metadata"] = json.dumps(description | {"version": "0.1"}).encode()
    datasets.set_state(batches, files, path="run/1")
    assert "was saved by grain 0.1; version" in caplog.text


def test_restoring_missing_dataset_raises_error(tmp_path):
    with flaxckpt.Checkpointer(tmp_path) as ckpt:
        ckpt.save(1, {"x": 1}).wait()
        with pytest.raises(errors.DatasetStateError, match="dataset=None"):
            ckpt.restore(dataset=StepIndexed(lambda i: i))


def test_reports_iterator_rejecting_state(tmp_path):
    with flaxckpt.Checkpointer(tmp_path) as ckpt:
        ckpt.save(1, {"x": 1}, dataset=StepIndexed(lambda i: i)).wait()
        with pytest.raises(errors.DatasetStateError, match="does not accept the state"):
            ckpt.restore(dataset=Everything())


def test_mismatched_state_leaves_iterator_unchanged(tmp_path):
    iterator = StepIndexed(lambda i: i)
    with flaxckpt.Checkpointer(tmp_path) as ckpt:
        ckpt.save(1, {"x": 1}, dataset=iterator).wait()
        next(iterator)
        with pytest.raises(errors.RestoreMismatchError):
            ckpt.restore({"y": 1}, dataset=iterator)
    assert next(iterator) == 1


def test_missing_dataset_file_falls_back_to_older_step(tmp_path):
    with flaxckpt.Checkpointer(tmp_path) as ckpt:
        for step in (1, 2):
            batches = StepIndexed(lambda i: i, start=step)
            ckpt.save(step, {"x": step}, dataset=batches).wait()
        (tmp_path / "2/dataset/process_0-of-1.json").unlink()
        batches = StepIndexed(lambda i: i)
        assert ckpt.restore(dataset=batches) == {"x": 1}
        assert next(batches) == 1


def test_changed_dataset_file_counts_as_damage(tmp_path):
    with flaxckpt.Checkpointer(tmp_path) as ckpt:
        ckpt.save(1, {"x": 1}, dataset=StepIndexed(lambda i: i)).wait()
        file = tmp_path / "1/dataset/process_0-of-1.json"
        file.write_text(file.read_text().replace("0", "7"))
        with pytest.raises(errors.DamagedCheckpointError, match="has changed"):
            ckpt.restore(dataset=StepIndexed(lambda i: i))


def test_only_elastic_iterators_allow_other_process_count(tmp_path):
    saved = {"process_0-of-2.json": b'{"next_index": 8}'}
    saved["process_1-of-2.json"] = saved["process_0-of-2.json"]
    elastic = StepIndexed(lambda i: i)
    datasets.set_state(elastic, saved, path=tmp_path)
    assert next(elastic) == 8
    with pytest.raises(errors.DatasetStateError, match="states of 2 processes"):
        datasets.set_state(Everything(), saved, path=tmp_path)
    saved["process_1-of-2.json"] = b'{"next_index": 9}'
    with pytest.raises(errors.DatasetStateError, match="states of 2 processes"):
        datasets.set_state(elastic, saved, path=tmp_path)


@pytest.mark.parametrize(
    ("uses", "told"), [(1, []), (2, []), (4, ["1, 2, 3"]), (9, ["1, 2, 3"])]
)
def test_save_warns_of_dataset_whose_state_stands_still(tmp_path, caplog, uses, told):
    dataset = StepIndexed(lambda i: i)
    with flaxckpt.Checkpointer(tmp_path / "run") as ckpt:
        for step in range(1, 9):
            if step % uses == 0:
                next(dataset)
            ckpt.save(step, {"w": step}, dataset=dataset)
            ckpt.save(step, {"w": step}, dataset=dataset, overwrite=True)
            ckpt.save_params_only(step, {"w": step})
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == len(told)
    for steps, message in zip(told, messages, strict=True):
        assert f"the same at the steps {steps}: a resume" in message


class Indexed:
    """Reads the state of a StepIndexed."""

    def get_state(self):
        return {"next_index": 0}

    def set_state(self, state):
        self.state = state


def test_restore_warns_of_state_of_another_class(tmp_path, caplog):
    with flaxckpt.Checkpointer(tmp_path / "run") as ckpt:
        ckpt.save(1, {"w": 1}, dataset=StepIndexed(lambda i: i, start=3)).wait()
        ckpt.restore(dataset=StepIndexed(lambda i: i))
        assert not caplog.records
        ckpt.restore(dataset=(other := Indexed()))
    assert other.state == {"next_index": 3}
    [told] = [record.getMessage() for record in caplog.records]
    assert "saved by flaxckpt.datasets._iterators.StepIndexed;" in told
    assert "Indexed may read it differently: compare the first batches" in told


def test_error_of_state_with_other_types_says_what_to_return(tmp_path):
    dataset = Indexed()
    dataset.get_state = lambda: {"file": Path("x")}
    with pytest.raises(errors.DatasetStateError, match=r"Indexed.*Path") as told:
        flaxckpt.Checkpointer(tmp_path / "run").save(1, {"w": 1}, dataset=dataset)
    assert "at state['file']: wanted dicts, lists" in str(told.value)
    assert "Return only what is wanted from get_state" in str(told.value)
