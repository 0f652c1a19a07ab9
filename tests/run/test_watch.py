"""Jobs that read checkpoints while others save and delete them."""

import logging
import os
import signal
import socket
import time

import numpy as np
import pytest

import flaxckpt
from flaxckpt import errors
from flaxckpt.policies import LatestN
from tests.helpers import programs, run_files, seams, strategies

OLD = 3600


def state(step):
    return {"w": np.full((8, 8), float(step)), "step": step}


def save(root, *steps):
    with flaxckpt.Checkpointer(root) as ckpt:
        for step in steps:
            ckpt.save(step, state(step))


def leases(root):
    return list(root.glob(f"*/{run_files.READING}*"))


def ready(root, **options):
    """The steps that are given out without waiting."""
    reader = flaxckpt.Checkpointer(root, read_only=True)
    return list(reader.new_steps(timeout_secs=0, **options))


# ---- in processes of their own ---------------------------------------------------

TRAINER = """
    import sys
    from pathlib import Path
    import numpy as np
    import flaxckpt
    from flaxckpt.policies import LatestN

    root, stop = map(Path, sys.argv[1:])
    with flaxckpt.Checkpointer(root, keep=[LatestN(1)]) as ckpt:
        step = 0
        while not stop.exists():
            step += 1
            ckpt.save(step, {"w": np.full((8, 8), float(step)), "step": step})
    print(step)
"""


@pytest.mark.slow
def test_slow_reader_prevents_deletion_of_its_step(tmp_path):
    root, stop = tmp_path / "run", tmp_path / "stop"
    trainer = programs.start_text(TRAINER, root, stop)
    reader = flaxckpt.Checkpointer(root, read_only=True)
    seen = []
    try:
        for step in reader.new_steps(timeout_secs=60, poll_secs=0.01):
            strategies.assert_same(state(step), reader.restore(step=step))
            # By then, the trainer would have deleted it.
            while reader.latest_step() < step + 3 and trainer.poll() is None:
                time.sleep(0.01)
            strategies.assert_same(state(step), reader.restore(state(0), step=step))
            seen.append(step)
            if len(seen) == 8:
                break
    finally:
        stop.touch()
        last = int(trainer.communicate(timeout=300)[0])
    assert trainer.returncode == 0
    assert seen == sorted(set(seen))
    assert len(seen) == 8
    assert not leases(root)
    with flaxckpt.Checkpointer(root, keep=[LatestN(1)]) as ckpt:
        ckpt.prune()
    assert ckpt.steps() == [last], "nothing is held any more"


READER = """
    import sys, time
    import flaxckpt

    reader = flaxckpt.Checkpointer(sys.argv[1], read_only=True)
    for step in reader.new_steps():
        print(step, flush=True)
        time.sleep(3600)
"""


@pytest.mark.slow
def test_lease_of_killed_reader_expires(tmp_path, monkeypatch):
    save(tmp_path, 1)
    reader = programs.start_text(READER, tmp_path)
    assert reader.stdout.readline() == "1\n"
    ckpt = flaxckpt.Checkpointer(tmp_path, keep=[LatestN(1)])
    ckpt.save(2, state(2)).wait()
    [why] = ckpt.explain()[1]
    assert why.startswith("being read by ")
    assert why.endswith(f":{reader.pid}")
    reader.send_signal(signal.SIGKILL)
    reader.communicate()
    ckpt.save(3, state(3)).wait()
    assert ckpt.steps() == [1, 3]
    seams.replace(monkeypatch, "leases.expires_secs", 0.1)
    time.sleep(0.2)
    ckpt.save(4, state(4)).wait()
    assert ckpt.steps() == [4]
    ckpt.close()


# ---- in one ----------------------------------------------------------------------


def test_holds_each_step_until_loop_continues(tmp_path):
    save(tmp_path, 1, 2, 3)
    ckpt = flaxckpt.Checkpointer(tmp_path, keep=[LatestN(1)])
    held = ckpt.new_steps(timeout_secs=0)
    assert next(held) == 1
    [file] = leases(tmp_path)
    assert file.parent.name == "1"
    assert ckpt.explain()[1] == [f"being read by {socket.gethostname()}:{os.getpid()}"]
    assert ckpt.prune(dry_run=True) == ckpt.prune() == (2,)
    assert next(held) == 3
    assert ckpt.prune() == (1,)
    assert list(held) == []
    assert not leases(tmp_path)


@pytest.mark.parametrize("end", ["break", "close", "error"])
def test_loop_ending_early_holds_nothing(tmp_path, end):
    save(tmp_path, 1)
    steps = flaxckpt.Checkpointer(tmp_path).new_steps()
    try:
        for _ in steps:
            assert leases(tmp_path)
            if end == "error":
                raise ZeroDivisionError
            break
    except ZeroDivisionError:
        pass
    steps.close()
    assert not leases(tmp_path)


def test_keeps_dataset_state_while_reader_holds_step(tmp_path):
    batches = flaxckpt.datasets.StepIndexed(lambda i: i)
    with flaxckpt.Checkpointer(tmp_path, keep_dataset=[LatestN(1)]) as ckpt:
        ckpt.save(1, state(1), dataset=batches).wait()
        for step in ckpt.new_steps(timeout_secs=0):
            if step == 1:
                ckpt.save(2, state(2), dataset=batches).wait()
                ckpt.restore(step=1, dataset=batches)
        ckpt.prune()
        assert not ckpt.metadata(1).has_dataset


def test_delete_rejects_step_being_read(tmp_path):
    save(tmp_path, 1)
    ckpt = flaxckpt.Checkpointer(tmp_path)
    for step in ckpt.new_steps(timeout_secs=0):
        with pytest.raises(errors.SaveFailedError, match="is being read by"):
            ckpt.delete(step)
        strategies.assert_same(state(1), ckpt.restore(step=step))
    ckpt.delete(1)
    assert ckpt.steps() == []


@pytest.mark.parametrize("rules", ["keep", "keep_dataset"])
def test_reader_starting_during_decision_keeps_its_step(
    tmp_path, caplog, monkeypatch, rules
):
    caplog.set_level(logging.INFO, logger="flaxckpt")
    batches = flaxckpt.datasets.StepIndexed(lambda i: i)
    with flaxckpt.Checkpointer(tmp_path) as ckpt:
        for step in (1, 2):
            ckpt.save(step, state(step), dataset=batches)

    class Late:
        """Judges, and by then somebody reads."""

        def preserved(self, checkpoints):
            assert next(reading) == 1
            return set()

    def withdraw(final, aside):
        raise AssertionError("not even for a moment")

    seams.replace(monkeypatch, "rename.withdraw", withdraw)
    ckpt = flaxckpt.Checkpointer(tmp_path, **{rules: [Late()]})
    reading = ckpt.new_steps()
    assert ckpt.prune() == ()
    assert "step 1 stays for now" in caplog.text
    strategies.assert_same(state(1), ckpt.restore(step=1, dataset=batches))
    reading.close()
    assert ready(tmp_path) == [1, 2], "nothing says any more that it is going"


def test_late_noticed_reader_gets_its_step_back(tmp_path, monkeypatch):
    save(tmp_path, 1, 2)
    real = seams.current("rename.withdraw")

    def withdraw(final, aside):
        run_files.add_lease(final)
        real(final, aside)

    ckpt = flaxckpt.Checkpointer(tmp_path, keep=[LatestN(1)])
    with monkeypatch.context() as patch:
        seams.replace(patch, "rename.withdraw", withdraw)
        assert ckpt.prune() == ()
    assert ckpt.explain()[1] == ["being read by there:7"]
    strategies.assert_same(state(1), ckpt.restore(step=1))
    leases(tmp_path)[0].unlink()
    assert ready(tmp_path) == [1, 2], "nothing says any more that it is going"
    assert ckpt.prune() == (1,)


def test_new_steps_skips_step_about_to_be_deleted(tmp_path):
    save(tmp_path, 1, 2)
    mark = tmp_path / "1" / run_files.DELETING
    mark.touch()
    reader = flaxckpt.Checkpointer(tmp_path).new_steps(timeout_secs=60, poll_secs=0.01)
    assert next(reader) == 2
    assert ready(tmp_path) == [2]
    mark.unlink()
    assert next(reader) == 1, "it stayed after all"
    mark.touch()
    age(mark)
    assert ready(tmp_path) == [1, 2], "whoever was about to delete it is gone"


def age(file):
    found = file.stat()
    os.utime(file, (found.st_atime - OLD, found.st_mtime - OLD))


def test_reader_renews_its_lease(tmp_path, monkeypatch):
    save(tmp_path, 1, 2)
    seams.replace(monkeypatch, "leases.expires_secs", 0.2)
    held = flaxckpt.Checkpointer(tmp_path).new_steps()
    next(held)
    [file] = leases(tmp_path)
    age(file)
    old = file.stat().st_mtime
    deadline = time.monotonic() + 60
    while file.stat().st_mtime == old and time.monotonic() < deadline:
        time.sleep(0.01)
    assert file.stat().st_mtime > old + OLD / 2
    held.close()


def test_yields_unprotected_steps_where_nothing_is_writable(
    tmp_path, monkeypatch, caplog
):
    save(tmp_path, 1, 2)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", not_to_write)
        assert ready(tmp_path) == [1, 2]
    assert caplog.text.count("no lease can be written") == 1


def not_to_write(path, flags, *args, real=os.open, **kwargs):
    """As `os.open` where not even root may write."""
    if flags & (os.O_CREAT | os.O_RDWR | os.O_WRONLY):
        raise PermissionError(13, "Permission denied", str(path))
    return real(path, flags, *args, **kwargs)


def test_read_only_reader_sees_steps_of_interrupted_deletions(tmp_path, monkeypatch):
    save(tmp_path, 1, 2)
    mark = tmp_path / "1" / run_files.DELETING
    mark.touch()
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", not_to_write)
        assert ready(tmp_path) == [2]
        age(mark)
        assert ready(tmp_path) == [2], "by another clock, it may not be that old"
        age(mark)
        assert ready(tmp_path) == [1, 2]


def test_ignores_lease_from_future(tmp_path):
    save(tmp_path, 1, 2)
    file = run_files.add_lease(tmp_path / "1")
    os.utime(file, (time.time() + 1e6, time.time() + 1e6))
    ckpt = flaxckpt.Checkpointer(tmp_path, keep=[LatestN(1)])
    assert ckpt.explain()[1] == []
    assert ckpt.prune() == (1,)


@pytest.mark.slow
def test_abandoned_loop_releases_its_lease_at_exit(tmp_path):
    save(tmp_path, 1)
    code = """if True:
        import sys
        import flaxckpt
        steps = flaxckpt.Checkpointer(sys.argv[1]).new_steps()
        print(next(steps))
    """
    done = programs.run("-c", code, tmp_path)
    assert (done.stdout, done.stderr) == ("1\n", "")
    assert not leases(tmp_path)


def test_reader_of_briefly_moved_step_leaves_no_file(tmp_path):
    save(tmp_path, 1)
    held = flaxckpt.Checkpointer(tmp_path).new_steps()
    assert next(held) == 1
    (tmp_path / "1").rename(tmp_path / "aside")
    held.close()
    assert not leases(tmp_path)


@pytest.mark.slow
def test_forked_child_keeps_lease_of_parent(tmp_path):
    save(tmp_path, 1)
    code = """
        import os, sys
        import flaxckpt
        steps = flaxckpt.Checkpointer(sys.argv[1]).new_steps()
        next(steps)
        if not (child := os.fork()):
            steps.close()
            sys.exit()
        os.waitpid(child, 0)
        print(*(name for name in os.listdir(sys.argv[1] + "/1") if "READING" in name))
    """
    done = programs.run_text(code, tmp_path)
    assert done.stdout.count("READING") == 1
    assert not leases(tmp_path)


def test_new_steps_skips_directories_named_like_steps(tmp_path):
    save(tmp_path, 1)
    (tmp_path / "2024").mkdir()
    (tmp_path / "2024" / "notes.txt").touch()
    assert ready(tmp_path) == [1]
    assert [path.name for path in (tmp_path / "2024").iterdir()] == ["notes.txt"]


def test_new_steps_yields_step_saved_out_of_order(tmp_path):
    with flaxckpt.Checkpointer(tmp_path) as ckpt:
        ckpt.save(10, state(10)).wait()
        seen = []
        for step in ckpt.new_steps(timeout_secs=0.3, poll_secs=0.01):
            seen.append(step)
            ckpt.save(5, state(5), on_exists="skip").wait()
    assert seen == [10, 5]


def test_explain_distinguishes_reader_names(tmp_path):
    save(tmp_path, 1)
    for name, reader in (("my-host-12-ab", "my-host:12"), ("", "READING-")):
        lease = tmp_path / "1" / f"{run_files.READING}{name}"
        lease.touch()
        why = flaxckpt.Checkpointer(tmp_path).explain()[1]
        assert f"being read by {reader}" in why
        lease.unlink()
