"""A buffer makes batches ahead, and its state knows only of those that were taken."""

import gc
import itertools
import threading

import grain
import jax
import numpy as np
import pytest

import flaxckpt
from flaxckpt import datasets, errors
from flaxckpt.datasets import Buffered, StepIndexed
from tests.helpers import programs, seams
from tests.helpers.dataset_runs import assert_resumes
from tests.helpers.interruptions import ends, interrupt


def counting(**options):
    return Buffered(StepIndexed(lambda i: i), **options)


def grain_batches():
    source = grain.MapDataset.range(60).seed(3).shuffle().repeat(2)
    return iter(source.to_iter_dataset().filter(lambda x: x % 3).batch(4))


class Loader:
    """Keeps its state as torchdata's: on what `iter` is called on, and lazily."""

    def __init__(self, size=5):
        self.size = size
        self.at = 0
        self.begin = 0

    def __iter__(self):
        self.at, self.begin = self.begin, 0
        while self.at < self.size:
            self.at += 1
            yield self.at - 1

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.begin = state["at"]


def threads():
    return [t for t in threading.enumerate() if t.name == "flaxckpt Buffered"]


@pytest.fixture(autouse=True)
def no_thread_is_left_behind():
    yield
    gc.collect()
    for thread in threads():
        thread.join(30)
    assert not threads()


# ---- exactness -------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("depth", [1, 3, 100])
def test_buffered_run_resumes_after_last_taken_batch(tmp_path, depth):
    assert_resumes(tmp_path, lambda: Buffered(grain_batches(), depth), [1, 7, 19, 20])


def test_buffered_loader_resumes_in_any_epoch(tmp_path):
    assert_resumes(
        tmp_path,
        lambda: Buffered(Loader(), 3),
        [1, 4, 5, 6, 9, 10],
        epochs=2,
        epoch_size=5,
    )


def test_buffer_with_jax_transform_resumes(tmp_path):
    def make():
        return Buffered(grain_batches(), transform=jax.device_put)

    assert isinstance(next(make()), jax.Array)
    assert_resumes(tmp_path, make, [3])


@pytest.mark.parametrize("taken_before", [0, 1, 4])
def test_set_state_works_before_and_after_first_batch(taken_before):
    for make in (counting, lambda: Buffered(Loader(100))):
        with make() as used, make() as fresh:
            wanted = list(itertools.islice(used, 30))
            state = used.get_state()
            list(itertools.islice(fresh, taken_before))
            fresh.set_state(state)
            assert fresh.get_state() == state
            assert next(fresh) == next(used) == len(wanted)


def test_state_before_first_batch_is_initial_state():
    with counting() as batches:
        assert batches.get_state() == {"next_index": 0}
        assert next(batches) == 0
        assert batches.get_state() == {"next_index": 1}


def test_buffering_does_not_change_saved_files(tmp_path):
    buffered, bare = Buffered(grain_batches()), grain_batches()
    for batches in (buffered, bare):
        list(itertools.islice(batches, 5))
    assert datasets.state_files(buffered) == datasets.state_files(bare)
    wanted = [batch.tolist() for batch in bare]
    fresh = grain_batches()
    datasets.set_state(fresh, datasets.state_files(buffered), path=tmp_path)
    assert [batch.tolist() for batch in fresh] == wanted


class Shared(StepIndexed):
    """Gives the same dict every time, and changes it."""

    def __init__(self):
        super().__init__(lambda i: i)
        self.state = {}

    def get_state(self):
        self.state["next_index"] = self._next
        return self.state


def test_copies_states_mutated_in_place():
    with Buffered(Shared(), depth=10) as batches:
        next(batches)
        wait_until_ahead(batches, 11)
        assert batches.get_state() == {"next_index": 1}


def wait_until_ahead(batches, index):
    while batches.iterator._next < index:
        threading.Event().wait(0.001)


def test_buffer_stays_within_its_depth():
    made = []
    with Buffered(StepIndexed(made.append), depth=3) as batches:
        for taken in range(1, 5):
            next(batches)
            wait_until_ahead(batches, taken + 3)
            assert len(made) <= taken + 3
        assert threads()


def test_starts_no_thread_before_first_batch():
    batches = Buffered(StepIndexed(pytest.fail))
    batches.get_state()
    iter(batches)
    assert not threads()


def test_buffers_can_be_nested():
    with counting() as inner, Buffered(inner, transform=lambda i: -i) as outer:
        assert list(itertools.islice(outer, 5)) == [0, -1, -2, -3, -4]
        assert outer.get_state() == {"next_index": 5}
        outer.set_state({"next_index": 2})
        assert next(outer) == -2


# ---- ends and errors -------------------------------------------------------------


def test_exhausted_buffer_keeps_raising_stop_iteration():
    batches = Buffered(Loader(3), depth=5)
    assert [next(batches) for _ in range(3)] == [0, 1, 2]
    for _ in range(3):
        with pytest.raises(StopIteration):
            next(batches)
    assert list(batches) == [0, 1, 2]  # iter() begins the next epoch
    finite = Buffered(iter(grain.MapDataset.range(3).to_iter_dataset()))
    assert [int(i) for i in finite] == [0, 1, 2]
    assert list(finite) == []


def test_reports_final_iterator_state_after_end():
    class Marked(Loader):
        def __iter__(self):
            yield from super().__iter__()
            self.at = "end"

    batches = Buffered(Marked(2), depth=5)
    assert [next(batches), next(batches)] == [0, 1]
    assert batches.get_state() == {"at": 2}
    assert next(batches, None) is None
    assert batches.get_state() == {"at": "end"}


@pytest.mark.parametrize("where", ["iterator", "transform"])
def test_raises_errors_in_order_and_continues(where):
    def fail_at_2(i):
        if i == 2:
            raise ZeroDivisionError("batch 2")
        return i

    class Flaky(StepIndexed):
        def __next__(self):
            self._next += 1
            return fail_at_2(self._next - 1)

    if where == "iterator":
        batches = Buffered(Flaky(int), depth=5)
    else:
        batches = counting(depth=5, transform=fail_at_2)
    assert [next(batches), next(batches)] == [0, 1]
    with pytest.raises(ZeroDivisionError, match="batch 2"):
        next(batches)
    assert batches.get_state() == {"next_index": 2}
    assert [next(batches), next(batches)] == [3, 4]
    assert batches.get_state() == {"next_index": 5}
    batches.close()


def test_loader_continues_its_epoch_after_error():
    def fail_at_2(i):
        if i == 2:
            raise ZeroDivisionError
        return i

    batches = Buffered(Loader(), depth=5, transform=fail_at_2)
    assert [next(batches), next(batches)] == [0, 1]
    with pytest.raises(ZeroDivisionError):
        next(batches)
    assert list(batches) == [3, 4]


def test_rejected_state_leaves_buffer_unchanged():
    batches = counting()
    assert [next(batches), next(batches)] == [0, 1]
    with pytest.raises(errors.DatasetStateError, match="next_index"):
        batches.set_state({})
    assert next(batches) == 2
    batches.close()


def test_rejects_iterators_without_state():
    with pytest.raises(errors.DatasetStateError, match="generator cannot be saved"):
        Buffered(i for i in range(3))
    with pytest.raises(errors.OptionError, match="depth"):
        counting(depth=0)


# ---- its thread ------------------------------------------------------------------


def test_close_ends_thread_and_keeps_state(tmp_path):
    with counting() as batches:
        next(batches)
        assert len(threads()) == 1
    assert not threads()
    with pytest.raises(errors.DatasetStateError, match="closed"):
        next(batches)
    with pytest.raises(errors.DatasetStateError, match="closed"):
        batches.set_state({"next_index": 0})
    with flaxckpt.Checkpointer(tmp_path) as ckpt:
        ckpt.save(1, {"x": np.ones(2)}, dataset=batches)
        fresh = StepIndexed(lambda i: i)
        ckpt.restore(dataset=fresh)
    assert next(fresh) == 1


def test_set_state_leaves_one_thread():
    with counting() as batches:
        for start in range(5):
            batches.set_state({"next_index": start})
            assert next(batches) == start
            assert len(threads()) == 1


@pytest.mark.slow
def test_thread_ends_when_buffer_is_garbage_collected():
    batches = counting()
    next(batches)
    [thread] = threads()
    del batches
    gc.collect()
    thread.join(30)
    assert not thread.is_alive()


def test_buffer_does_not_delay_program_exit(tmp_path):
    script = tmp_path / "ends.py"
    script.write_text(
        "from flaxckpt.datasets import Buffered, StepIndexed\n"
        "batches = Buffered(StepIndexed(lambda i: i))\n"
        "print(next(batches))\n"
    )
    done = programs.run(script)
    assert (done.stdout, done.stderr) == ("0\n", "")


def test_forked_child_raises_error_instead_of_waiting():
    done = programs.run_text("""
        import os, sys, warnings
        from flaxckpt import errors
        from flaxckpt.datasets import Buffered, StepIndexed

        batches = Buffered(StepIndexed(lambda i: i))
        next(batches)
        if child := os.fork():
            sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        for use, *given in ((next, batches), (batches.set_state, {"next_index": 0})):
            try:
                use(*given)
            except errors.DatasetStateError as error:
                print(error)
        print(batches.get_state())
        batches.close()
    """)
    assert done.stdout.count("in another process") == 2
    assert done.stdout.endswith("{'next_index': 1}\n")


def test_close_does_not_wait_for_blocked_batch(monkeypatch):
    seams.replace(monkeypatch, "buffered.seconds_at_exit", 0.01)
    go_on = threading.Event()
    batches = Buffered(StepIndexed(lambda i: i and go_on.wait()))
    with batches:
        assert next(batches) == 0  # and then Ctrl-C, say
    assert threads(), "it is still at it"
    go_on.set()


def test_stop_iteration_in_transform_raises_runtime_error():
    with (
        counting(transform=lambda i: next(iter([i][: 1 - i]))) as batches,
        pytest.raises(RuntimeError, match="StopIteration"),
    ):
        assert list(batches) == []


@pytest.mark.parametrize("depth", [1.5, "2", True, None, 0, -1])
def test_rejects_invalid_depth(depth):
    with pytest.raises(errors.OptionError, match=f"at least 1, got {depth!r}"):
        counting(depth=depth)


class Sharded:
    """Takes from its shards in turn."""

    def __init__(self, shards):
        self.taken = [0] * shards
        self.at = 0

    def __next__(self):
        self.taken[self.at] += 1
        self.at = (self.at + 1) % len(self.taken)
        return sum(self.taken)

    def get_state(self):
        return {"taken": self.taken, "at": self.at}

    def set_state(self, state):
        self.taken, self.at = state["taken"], state["at"]

    def get_shard_states(self):
        return self.taken

    def set_shard_states(self, states):
        self.taken, self.at = states, 0


def test_buffer_exposes_shards_of_its_iterator(tmp_path):
    bare, buffered = Sharded(3), Buffered(Sharded(3), depth=5)
    for batches in (bare, buffered):
        assert [next(batches) for _ in range(4)] == [1, 2, 3, 4]
    files = datasets.state_files(buffered)
    assert files == datasets.state_files(bare)
    assert "shard_state_2.json" in files
    with Buffered(Buffered(Sharded(3))) as fresh:
        fresh.set_shard_states([2, 1, 1])
        assert fresh.get_shard_states() == [2, 1, 1]
        assert next(fresh) == 5
        assert fresh.get_shard_states() == [3, 1, 1]
        fresh.set_state(buffered.get_state())
        assert fresh.get_shard_states() == [2, 1, 1]
        assert next(fresh) == 5
        assert fresh.get_shard_states() == [2, 2, 1]
    buffered.close()
    assert counting().get_shard_states is None


def test_ctrl_c_while_a_batch_is_taken_holds_up_nobody():
    for place in itertools.count():
        third = threading.Event()
        source = StepIndexed(lambda i, third=third: third.set() if i == 2 else i)
        with Buffered(source, depth=2) as batches:
            next(batches)
            assert third.wait(60)  # the second is ready: the next call does not wait
            is_hit = interrupt(lambda batches=batches: next(batches), place)
            assert ends(lambda batches=batches: next(batches)), place
        if not is_hit:
            break
    assert place > 5
