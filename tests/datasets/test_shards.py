"""States saved by N processes, restored by M: exactly, or with an error that helps."""

import itertools
import json

import grain
import pytest

from flaxckpt import datasets, errors
from flaxckpt.datasets import Buffered, Restarting, StepIndexed
from tests.helpers import seams

BATCHES = 24


@pytest.fixture
def process(monkeypatch):
    """Makes this process one of several."""

    def become(index, count):
        seams.replace(monkeypatch, "processes.process_index", lambda: index)
        seams.replace(monkeypatch, "processes.process_count", lambda: count)

    return become


def save(process, count, make):
    """The files of all processes together; `make(index)` is what each one passes."""
    files = {}
    for index in range(count):
        process(index, count)
        files.update(datasets.state_files(make(index)))
    return files


def part(index, count, taken=0):
    """An iterator over one of several parts of the data, of which some is taken."""
    data = grain.MapDataset.range(BATCHES)[index::count]
    return advanced(iter(data.to_iter_dataset()), taken)


def advanced(iterator, taken):
    for _ in range(taken):
        next(iterator)
    return iterator


def rest(iterators):
    return [[int(batch) for batch in iterator] for iterator in iterators]


def test_each_process_restores_its_own_state(process):
    files = save(process, 3, lambda i: part(i, 3, taken=i + 1))
    assert {name for name in files if name != "metadata"} == {
        f"process_{i}-of-3.json" for i in range(3)
    }
    for index in range(3):
        process(index, 3)
        fresh = part(index, 3)
        datasets.set_state(fresh, files, path="run/1")
        assert rest([fresh]) == rest([part(index, 3, taken=index + 1)])


def elastic(index, count):
    shards = grain.sharding.ShardOptions(index, count)
    data = grain.MapDataset.range(BATCHES * 4)
    return iter(grain.experimental.ElasticIterator(data, 8, shards))


@pytest.mark.parametrize(("before", "after"), [(2, 4), (4, 1), (1, 2)])
def test_grain_elastic_iterators_continue_with_any_process_count(
    process, before, after
):
    files = save(process, before, lambda i: advanced(elastic(i, before), 3))
    found = []
    for index in range(after):
        process(index, after)
        fresh = elastic(index, after)
        datasets.set_state(fresh, files, path="run/1")
        found.extend(next(fresh).tolist())
    assert sorted(found) == list(range(24, 32))


def shared_file(iterator):
    """The file that MaxText writes for all processes together."""
    return {"process_0.json": json.dumps(iterator.get_state(), indent=4).encode()}


@pytest.mark.parametrize("count", [1, 2, 4])
def test_all_processes_restore_shared_file(process, count):
    files = shared_file(advanced(elastic(0, 1), 3))
    found = []
    for index in range(count):
        process(index, count)
        fresh = elastic(index, count)
        datasets.set_state(fresh, files, path="run/1")
        found.extend(next(fresh).tolist())
    assert sorted(found) == list(range(24, 32))


def test_rejects_shared_file_for_partitioned_data(process):
    files = shared_file(part(0, 1, taken=7))
    process(0, 2)
    with pytest.raises(errors.DatasetStateError, match="of 1 process, but this run"):
        datasets.set_state(part(0, 2), files, path="run/1")
    process(0, 1)
    fresh = part(0, 1)
    datasets.set_state(fresh, files, path="run/1")
    assert rest([fresh]) == rest([part(0, 1, taken=7)])


def test_step_indexed_continues_with_any_process_count(process):
    files = save(process, 4, lambda i: StepIndexed(lambda i: i, start=8))
    process(1, 2)
    for fresh in (StepIndexed(lambda i: i), Buffered(StepIndexed(lambda i: i))):
        datasets.set_state(fresh, files, path="run/1")
        assert next(fresh) == 8


def test_rejects_elastic_iterators_at_different_positions(process):
    files = save(process, 2, lambda i: StepIndexed(lambda i: i, start=i))
    process(0, 1)
    with pytest.raises(errors.DatasetStateError, match="states of 2 processes"):
        datasets.set_state(StepIndexed(lambda i: i), files, path="run/1")


def test_equal_states_do_not_make_iterator_elastic(process):
    files = save(process, 2, lambda i: part(i, 2, taken=7))
    process(0, 4)
    fresh = part(0, 4)
    with pytest.raises(errors.DatasetStateError) as info:
        datasets.set_state(fresh, files, path="run/1")
    message = str(info.value)
    assert "states of 2 processes, but this run has 4 processes" in message
    assert "restart with 2 processes" in message
    assert "ElasticIterator" in message
    assert "Restarting" in message
    assert "a list of" not in message  # 2 states cannot be spread over 4
    assert len(message.splitlines()) < 15
    assert rest([fresh]) == rest([part(0, 4)])


def test_iterator_lists_restore_states_of_more_processes(process):
    files = save(process, 4, lambda i: part(i, 4, taken=i))
    process(1, 2)
    with pytest.raises(errors.DatasetStateError, match="a list of 2 iterators"):
        datasets.set_state(part(1, 2), files, path="run/1")
    for index in range(2):
        process(index, 2)
        fresh = [part(index, 4), part(index + 2, 4)]
        datasets.set_state(fresh, files, path="run/1")
        wanted = [part(index, 4, taken=index), part(index + 2, 4, taken=index + 2)]
        assert rest(fresh) == rest(wanted)


def test_more_processes_restore_states_of_iterator_lists(process):
    files = save(
        process, 2, lambda i: (part(i, 4, taken=i), part(i + 2, 4, taken=i + 2))
    )
    assert len(files) == 5
    for index in range(4):
        process(index, 4)
        fresh = part(index, 4)
        datasets.set_state(fresh, files, path="run/1")
        assert rest([fresh]) == rest([part(index, 4, taken=index)])


def test_rejects_lists_without_iterators():
    with pytest.raises(errors.DatasetStateError, match="empty list"):
        datasets.state_files([])
    with pytest.raises(
        errors.DatasetStateError, match=r"builtins\.int cannot be saved"
    ):
        datasets.state_files([1, 2])


def test_mismatched_list_state_moves_no_iterator(process):
    files = save(process, 1, lambda i: [part(0, 2, taken=3), part(1, 2, taken=4)])
    files["process_1-of-2.json"] = b"{"
    fresh = [part(0, 2), part(1, 2)]
    with pytest.raises(errors.DatasetStateError, match="does not accept"):
        datasets.set_state(fresh, files, path="run/1")
    assert rest(fresh) == rest([part(0, 2), part(1, 2)])


# ---- starting again --------------------------------------------------------------


def test_restarting_restarts_data_with_warning(process, caplog):
    files = save(process, 2, lambda i: Restarting(part(i, 2, taken=5)))
    process(0, 1)
    fresh = part(0, 1)
    datasets.set_state(Restarting(fresh), files, path="run/1")
    assert rest([fresh]) == rest([part(0, 1)])
    assert "starts from the beginning" in caplog.text
    assert "2 processes" in caplog.text


def test_restarting_has_no_effect_on_fitting_states(process, caplog):
    files = save(process, 2, lambda i: Restarting(part(i, 2, taken=5)))
    process(1, 2)
    fresh = part(1, 2)
    datasets.set_state(Restarting(fresh), files, path="run/1")
    assert rest([fresh]) == rest([part(1, 2, taken=5)])
    assert not caplog.records
    with pytest.raises(errors.DatasetStateError, match="does not accept"):
        datasets.set_state(Restarting(elastic(1, 2)), files, path="run/1")


# ---- shards ----------------------------------------------------------------------

SHARDS = 8


class Sharded:
    """Goes round its shards, each of which has its own place."""

    def __init__(self, index, count):
        self.shards = list(range(index, SHARDS, count))
        self.places = [0] * len(self.shards)
        self.turn = 0

    def __iter__(self):
        return self

    def __next__(self):
        at = self.turn % len(self.shards)
        self.turn += 1
        self.places[at] += 1
        return self.shards[at], self.places[at] - 1

    def get_state(self):
        return {"places": list(self.places), "turn": self.turn}

    def set_state(self, state):
        self.places, self.turn = list(state["places"]), state["turn"]

    def get_shard_states(self):
        return [{"place": place} for place in self.places]

    def set_shard_states(self, states):
        self.places = [state["place"] for state in states]
        self.turn = 0


@pytest.mark.parametrize(("before", "after"), [(2, 4), (4, 2), (8, 1), (1, 8)])
def test_shards_move_between_processes(process, before, after):
    saved = [advanced(Sharded(i, before), 3 + i) for i in range(before)]
    files = save(process, before, lambda i: saved[i])
    found = {}
    for index in range(after):
        process(index, after)
        fresh = Sharded(index, after)
        datasets.set_state(fresh, files, path="run/1")
        found.update(itertools.islice(fresh, len(fresh.shards)))
    places = {s: p for it in saved for s, p in zip(it.shards, it.places, strict=True)}
    assert found == places


def test_same_process_count_keeps_shard_order(process):
    files = save(process, 2, lambda i: advanced(Sharded(i, 2), 3))
    process(1, 2)
    fresh = Sharded(1, 2)
    datasets.set_state(fresh, files, path="run/1")
    assert next(fresh) == next(advanced(Sharded(1, 2), 3))


def test_rejects_shards_of_other_data(process):
    files = save(process, 2, lambda i: Sharded(i, 2))
    process(0, 4)
    with pytest.raises(errors.DatasetStateError, match="its iterator has 4"):
        datasets.set_state(Sharded(0, 2), files, path="run/1")


def test_grain_interleave_shards_move_between_processes(process):
    def interleaved(index, count):
        shards = [
            grain.MapDataset.range(i * 10, i * 10 + 10).to_iter_dataset()
            for i in range(index, 4, count)
        ]
        mixed = grain.experimental.InterleaveIterDataset(
            shards, cycle_length=len(shards)
        )
        return iter(mixed)

    used = [advanced(interleaved(i, 2), 6) for i in range(2)]
    files = save(process, 2, lambda i: used[i])
    process(0, 1)
    fresh = interleaved(0, 1)
    datasets.set_state(fresh, files, path="run/1")
    assert sorted(rest([fresh])[0]) == sorted(itertools.chain(*rest(used)))


# ---- damage ----------------------------------------------------------------------


def test_missing_state_counts_as_damage(process):
    files = save(process, 3, lambda i: part(i, 3))
    del files["process_1-of-3.json"]
    for index, count in ((1, 3), (0, 2)):
        process(index, count)
        with pytest.raises(errors.DamagedCheckpointError, match="not all 3"):
            datasets.set_state(part(index, count), files, path="run/1")
        with pytest.raises(errors.DatasetStateError, match="passed no dataset"):
            datasets.set_state(part(index, count), files, path="run/1", is_whole=True)
