"""Several processes in one directory at one time: whole steps, or a clear error."""

import multiprocessing
import time

import pytest

import flaxckpt
from flaxckpt import errors
from flaxckpt.policies import EveryNSecs, LatestN
from tests.faults import scenarios
from tests.helpers import run_files, slow

ROUNDS = 20
STEPS = 25
READS = 60
TIMEOUT_SECS = 600
DAY, YEAR = 86_400.0, 365 * 86_400.0


class Others:
    """Functions in processes of their own, which begin at the same instant."""

    def __init__(self, works):
        context = multiprocessing.get_context("spawn")
        self._barrier = barrier = context.Barrier(len(works))
        self._ends = []
        self._processes = []
        for work, *args in works:
            end, far_end = context.Pipe()
            process = context.Process(target=_work, args=(far_end, work, barrier, args))
            process.start()
            far_end.close()
            self._ends.append(end)
            self._processes.append(process)

    def results(self):
        """What they have returned; all of them have ended well."""
        found = []
        try:
            for end in self._ends:
                assert end.poll(TIMEOUT_SECS), "it hangs"
                found.append(end.recv())
            for process in self._processes:
                process.join(TIMEOUT_SECS)
                assert process.exitcode == 0
        finally:
            for process in self._processes:
                process.kill()
        return found


def _work(end, work, barrier, args):
    end.send(work(barrier, *args))


def outcome(act):
    """What came of a save, or the name of what flaxckpt says against it."""
    try:
        act()
    except errors.CheckpointError as error:
        return type(error).__name__
    return "saved"


# ---- two writers of one step ---------------------------------------------------------


def save_in_rounds(barrier, directory, version, on_exists, layout):
    ckpt = flaxckpt.Checkpointer(directory, layout=layout)
    found = []
    for step in range(1, ROUNDS + 1):
        state = scenarios.state(step, version)
        barrier.wait(TIMEOUT_SECS)
        found.append(
            outcome(lambda: ckpt.save(step, state, on_exists=on_exists).wait())  # noqa: B023
        )
    return found


@pytest.mark.slow
@pytest.mark.parametrize("on_exists", ["error", "overwrite"])
@pytest.mark.parametrize(
    "layout", slow.all_but([scenarios.RAW, scenarios.ENCODED], [scenarios.RAW])
)
def test_one_of_two_writers_wins_step(directory, on_exists, layout):
    first, second = Others(
        [(save_in_rounds, directory, n, on_exists, layout) for n in range(2)]
    ).results()
    ckpt = flaxckpt.Checkpointer(directory)
    assert ckpt.steps() == list(range(1, ROUNDS + 1))
    for step, told in enumerate(zip(first, second, strict=True), 1):
        assert ckpt.verify(step).ok
        found = ckpt.restore(step=step, memory_map=False)
        versions = [n for n in range(2) if scenarios.is_state(found, step, n)]
        assert len(versions) == 1, "bit for bit what one of them has saved"
        if on_exists == "error":
            assert sorted(told) == ["CheckpointExistsError", "saved"]
            assert told[versions[0]] == "saved"
        else:
            assert "saved" in told
            assert set(told) <= {"saved", "SaveFailedError", "CheckpointExistsError"}
    assert scenarios.leftovers(directory) == []


# ---- two runs in one directory -------------------------------------------------------


def save_every_other(barrier, directory, first):
    found = []
    with flaxckpt.Checkpointer(
        directory, layout=scenarios.RAW, keep=[LatestN(2)]
    ) as ckpt:
        barrier.wait(TIMEOUT_SECS)
        for step in range(first, 2 * STEPS, 2):
            state = scenarios.state(step)
            found.append(outcome(lambda: ckpt.save(step, state).wait()))  # noqa: B023
    return found


@pytest.mark.slow
def test_concurrent_retention_leaves_whole_steps(directory):
    results = Others([(save_every_other, directory, n) for n in (1, 2)]).results()
    for told in results:
        assert len(told) >= STEPS - 1
        # What the other has deleted meanwhile, as there were newer ones, is told of.
        assert set(told) <= {"saved", "SaveFailedError"}
        assert told[-1] == "saved" or results[0][-1] == "saved"
    ckpt = flaxckpt.Checkpointer(directory, keep=[LatestN(2)])
    listed = ckpt.steps()
    assert 2 * STEPS - 1 in listed
    for step in listed:
        assert ckpt.verify(step).ok
        assert scenarios.is_state(ckpt.restore(step=step), step, 0)
    ckpt.prune()
    assert len(ckpt.steps()) == 2
    assert scenarios.leftovers(directory) == []


# ---- readers of what is deleted ------------------------------------------------------


def save_and_delete(barrier, directory, stop):
    step = 1
    with flaxckpt.Checkpointer(
        directory, layout=scenarios.RAW, keep=[LatestN(1)]
    ) as ckpt:
        ckpt.save(step, scenarios.state(step)).wait()
        barrier.wait(TIMEOUT_SECS)
        while not stop.exists():
            step += 1
            ckpt.save(step, scenarios.state(step)).wait()
    return step


def restore_again_and_again(barrier, directory, stop, memory_map):
    barrier.wait(TIMEOUT_SECS)
    reader = flaxckpt.Checkpointer(directory, read_only=True)
    found = {"whole": 0, "error": 0}
    newest = 0
    held = []
    end = time.monotonic() + TIMEOUT_SECS / 2
    while found["whole"] < READS and time.monotonic() < end:
        try:
            if found["whole"] % 2:
                state = flaxckpt.load(directory, memory_map=memory_map)
            else:
                state = reader.restore(memory_map=memory_map)
        except errors.CheckpointError:
            found["error"] += 1
            continue
        step = state["count"]
        assert scenarios.is_state(state, step, 0), "a whole step"
        assert step >= newest, "the newest never goes back"
        newest = step
        found["whole"] += 1
        held.append(state)  # what is mapped outlives its files
    stop.touch()
    assert all(scenarios.is_state(state, state["count"], 0) for state in held)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("memory_map", slow.all_but([False, True], [True]))
def test_reader_gets_whole_step_or_error_during_deletion(directory, memory_map):
    run, stop = directory / "run", directory / "stop"
    last, found = Others(
        [(save_and_delete, run, stop), (restore_again_and_again, run, stop, memory_map)]
    ).results()
    assert found["whole"] == READS
    assert last > 1
    ckpt = flaxckpt.Checkpointer(run)
    assert ckpt.steps() == [last]
    assert ckpt.damaged() == {}, "a reader marks nothing that is only gone"


# ---- a clock that jumps --------------------------------------------------------------


@pytest.fixture
def clock(monkeypatch):
    """Puts the clock on the wall forward, or back, by some seconds."""
    real, shifts = time.time, [0.0]
    monkeypatch.setattr(time, "time", lambda: real() + sum(shifts))
    return shifts.append


JUMPS = [(-DAY,), (YEAR,), (-DAY, YEAR, -DAY)]


@pytest.mark.parametrize("jumps", JUMPS)
def test_clock_jumps_delete_no_retained_step(tmp_path, clock, jumps):
    keep = [LatestN(2), EveryNSecs(3600)]
    ckpt = flaxckpt.Checkpointer(tmp_path, layout=scenarios.RAW, keep=keep)
    step = 0
    at_work = tmp_path / "900.orbax-checkpoint-tmp-writing-0123abcd"
    at_work.mkdir()
    with run_files.locked(at_work):
        for jump in (0.0, *jumps):
            clock(jump)
            for _ in range(4):
                step += 1
                ckpt.save(step, scenarios.state(step)).wait()
                assert ckpt.steps()[0] == 1, "the first is the first of its hour"
                assert set(ckpt.steps()) >= {max(1, step - 1), step}
            assert len(ckpt.steps()) <= 2 * len(jumps) + 3, "the others go"
            reading = ckpt.new_steps(timeout_secs=0)
            held = next(reading)
            with pytest.raises(errors.SaveFailedError, match="being read"):
                ckpt.delete(held)
            reading.close()
            assert flaxckpt.Checkpointer(tmp_path).steps() == ckpt.steps()
            assert at_work.exists(), "somebody works with it"
    assert all(ckpt.verify(each).ok for each in ckpt.steps())
    strange = tmp_path / "900.orbax-checkpoint-tmp-metrics"  # of nobody, and new
    strange.mkdir()
    clock(YEAR)
    flaxckpt.Checkpointer(tmp_path)
    assert strange.exists()


@pytest.mark.parametrize("jumps", JUMPS)
def test_clock_jumps_trigger_no_save(tmp_path, clock, jumps):
    with flaxckpt.Checkpointer(tmp_path) as ckpt:
        on_step = flaxckpt.CheckpointCallback(
            ckpt, every_secs=3600, on_preemption=False
        )
        for step in range(1, 101):
            if step % 20 == 0:
                clock(jumps[step // 20 % len(jumps)])
            on_step(step, scenarios.state(step))
        ckpt.wait()
        assert ckpt.steps() == []
    assert ckpt.steps() == [100], "the last, at the end"
