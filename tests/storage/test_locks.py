"""Locks in object stores: who holds them, for how long, and who takes them over."""

import errno
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import types
from pathlib import Path

import pytest

import flaxckpt
from flaxckpt import _storage, errors
from flaxckpt._storage import locks
from tests.helpers import faulty_store as faulty
from tests.helpers import seams, system_calls

ELSEWHERE = locks._Holder("x", "elsewhere boot ns", 17, "1")
UNREADABLE = {
    "empty": b"",
    "no text": b"\xff",
    "a list": b"[]",
    "another object": b'{"id": "x"}',
    "deep": b"[" * 100_000,
}
HOLDERS = {"elsewhere": ELSEWHERE, **UNREADABLE}


@pytest.fixture
def path():
    return faulty.new_path("locks") / "1"


@pytest.fixture
def clock(monkeypatch):
    """A clock that only sleeping moves, with actions to do in the nth sleep."""

    def sleep(secs):
        clock.now += secs
        clock.sleeps += 1
        clock.actions.pop(clock.sleeps, lambda: None)()

    clock = types.SimpleNamespace(now=1000.0, sleeps=0, actions={}, sleep=sleep)
    clock.monotonic = lambda: clock.now
    seams.replace(monkeypatch, "locks.time", clock)
    seams.replace(monkeypatch, "locks.seen", {})
    return clock


def put(path, holder):
    """Writes a lock of another holder."""
    content = holder if isinstance(holder, bytes) else holder.content()
    path.store.write(path.key + locks.LOCK, content)


def read(path):
    return json.loads(path.store.read(path.key + locks.LOCK).value)


def holder_of(process):
    return locks._Holder(
        "x", locks._machine(), process.pid, locks._started(process.pid)
    )


@pytest.fixture
def process():
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=-1) as process:
        yield process
        process.kill()


# ---- holding ----------------------------------------------------------------------


def test_lock_exists_until_released(path):
    with locks.lock(path) as lock:
        assert locks.is_locked(path)
        assert not lock.is_inherited
        assert lock.path == path
    assert not locks.is_locked(path)


def test_renews_held_lock_repeatedly(path, monkeypatch):
    seams.replace(monkeypatch, "locks.beat_secs", 0.01)
    with locks.lock(path):
        beats = [read(path)["beat"]]
        while len(set(beats)) < 4:
            beats.append(read(path)["beat"])
            time.sleep(0.001)
    assert beats == sorted(beats)
    assert not [t for t in threading.enumerate() if t.name == "flaxckpt store lock"]


def test_each_renewal_writes_its_time(path, clock):
    with locks.lock(path) as lock:
        assert read(path)["beat"] == 1000
        for beat in (1010, 1020):
            clock.now = beat
            lock.confirm()
            assert read(path)["beat"] == beat


def test_outage_does_not_end_renewals(path):
    with locks.lock(path) as lock:
        with faulty.faulty(path, last=0):
            assert lock._beat()
        assert lock._beat()
        lock.confirm()


def test_lost_lock_stays_lost(path, caplog):
    with locks.lock(path) as lock:
        put(path, ELSEWHERE)
        assert not lock._beat()
        with faulty.faulty(path, last=0) as kv:
            with pytest.raises(errors.CheckpointExistsError, match="taken over"):
                lock.confirm()
            lock.release()
            assert kv.requests == 0
    assert read(path)["id"] == "x"


def test_holds_lock_even_without_thread(path, monkeypatch):
    seams.refuse_threads(monkeypatch)
    with locks.lock(path) as lock:
        lock.confirm()
    assert not locks.is_locked(path)


def test_leaves_unremovable_lock_to_sweep(path, caplog):
    with faulty.faulty(path) as kv, locks.lock(path):
        kv._last = 0
    assert "could not release the lock" in caplog.text
    assert locks.is_locked(path)
    lock = locks.take_over(path)
    assert lock.is_inherited
    lock.confirm()
    lock.is_left = False
    lock.release()
    assert not locks.is_locked(path)


def test_holder_can_leave_lock(path):
    with locks.lock(path) as lock:
        lock.is_left = True
    assert locks.is_locked(path)
    with locks.lock(path) as lock:
        assert lock.is_inherited
        assert lock.is_left, "until the work of the dead holder is removed"
    assert locks.is_locked(path)


def test_leaving_does_not_replace_lock_of_new_holder(path, clock):
    with locks.lock(path) as lock:
        lock.is_left = True
        put(path, ELSEWHERE)
        clock.now += 50
    assert read(path)["id"] == "x"


def test_forked_child_does_not_release_lock_of_parent(path, monkeypatch):
    with locks.lock(path) as lock:
        with monkeypatch.context() as patch, faulty.faulty(path, last=0) as kv:
            child = os.getpid() + 1
            patch.setattr(os, "getpid", lambda: child)
            lock.release()
            assert kv.requests == 0
        assert lock._heartbeat._thread.is_alive()
        lock.confirm()


# ---- waiting ----------------------------------------------------------------------


def test_lock_held_on_this_machine_fails_without_waiting(path, clock, process):
    put(path, holder_of(process))
    with (
        pytest.raises(errors.CheckpointExistsError, match=f":{process.pid}: wait for"),
        locks.lock(path),
    ):
        pass
    assert clock.sleeps == 0


def test_patient_writer_acquires_released_lock(path, clock):
    first = locks._acquire(path, patient=False)
    clock.actions[5] = first.release
    with locks.lock(path, patient=True) as lock:
        assert not lock.is_inherited
    assert clock.sleeps == 5


def test_patient_writer_gives_up_after_one_minute(path, clock):
    first = locks._acquire(path, patient=False)
    clock.actions = dict.fromkeys(range(1000), first._beat)
    with (
        pytest.raises(errors.CheckpointExistsError, match="is being written by"),
        locks.lock(path, patient=True),
    ):
        pass
    assert 1060 <= clock.now < 1062
    first.release()


@pytest.mark.parametrize("holder", HOLDERS.values(), ids=HOLDERS)
def test_takes_over_stale_lock_of_another_machine(path, clock, holder):
    put(path, holder)
    with locks.lock(path) as lock:
        assert lock.is_inherited
        lock.confirm()
        lock.is_left = False
    assert 1045 <= clock.now < 1047
    assert not locks.is_locked(path)


@pytest.mark.parametrize(
    ("holder", "name"), [(ELSEWHERE, "elsewhere:17"), (b"", "an unknown process")]
)
def test_does_not_take_over_renewed_lock_of_another_machine(path, clock, holder, name):
    put(path, holder)
    clock.actions[80] = lambda: put(path, holder)
    with (
        pytest.raises(errors.CheckpointExistsError, match=f"written by {name}: wait"),
        locks.lock(path),
    ):
        pass
    assert clock.sleeps == 80


def test_truncates_long_holder_name():
    holder = locks._Holder("x", "h\x1b" * 99, 1, "1")
    name = locks._name(types.SimpleNamespace(value=holder.content()))
    assert name.startswith("h")
    assert name.isprintable()
    holder = holder._replace(machine="h" * 200)
    assert locks._name(types.SimpleNamespace(value=holder.content())) == "h" * 100


def be_late(monkeypatch):
    """Has another process take over each lock right before this one does."""
    real, quicker = seams.current("bucket.exchange"), ELSEWHERE._replace(id="quicker")

    def exchange(store, key, value, generation):
        real(store, key, quicker.content(), None)
        return real(store, key, value, generation)

    seams.replace(monkeypatch, "bucket.exchange", exchange)


def test_only_one_of_two_takes_over_lock(path, clock, monkeypatch):
    put(path, ELSEWHERE)
    seams.replace(monkeypatch, "bucket.create", lambda store, key, value: None)
    be_late(monkeypatch)
    with pytest.raises(errors.CheckpointExistsError), locks.lock(path):
        pass
    assert read(path)["id"] == "quicker"


def test_failing_lock_creation_raises_error_at_deadline(path, clock, monkeypatch):
    seams.replace(monkeypatch, "bucket.create", lambda store, key, value: None)
    with (
        pytest.raises(errors.StoreError, match="check that the bucket exists"),
        locks.lock(path),
    ):
        pass
    deadline = path.store.options.deadline_secs
    assert deadline <= clock.now - 1000 < deadline + 2


def test_acquires_lock_released_between_two_requests(path, clock, monkeypatch):
    real, tries = seams.current("bucket.create"), []

    def create(store, key, value):
        tries.append(key)
        return real(store, key, value) if len(tries) == 3 else None

    seams.replace(monkeypatch, "bucket.create", create)
    with locks.lock(path) as lock:
        assert not lock.is_inherited
    assert clock.sleeps == 2


# ---- taking over ------------------------------------------------------------------


def fail(path):
    """Leaves a lock of this process, as after a request without an answer."""
    with pytest.raises(errors.StoreError), locks.lock(path):
        raise errors.StoreError("no answer")


@pytest.mark.parametrize("wait", [0.0, 20.0])
def test_waits_for_late_requests_before_taking_over_own_lock(path, clock, wait):
    fail(path)
    clock.now += wait
    assert locks.take_over(path) is None
    with locks.lock(path) as lock:
        assert lock.is_inherited
    assert 1030 <= clock.now < 1031


def test_ignores_late_renewal_of_own_lock(path, clock):
    fail(path)
    key, content = path.key + locks.LOCK, json.dumps(read(path)).encode()
    clock.actions[5] = lambda: path.store.write(key, content)
    with locks.lock(path) as lock:
        assert lock.is_inherited
    assert 1030 <= clock.now < 1031


def test_sweep_takes_over_own_lock_after_late_requests(path, clock):
    fail(path)
    clock.now += 30
    lock = locks.take_over(path)
    assert lock.is_inherited
    lock.release()


def test_does_not_take_over_lock_of_live_process(path, process):
    assert locks.take_over(path) is None, "there is none"
    with locks.lock(path):
        assert locks.take_over(path) is None
    put(path, holder_of(process))
    assert locks.take_over(path) is None


@pytest.mark.parametrize("end", ["killed", "waited for", "replaced"])
@pytest.mark.parametrize("how", ["lock", "sweep"])
def test_takes_over_lock_of_dead_process_at_once(path, clock, process, end, how):
    holder = holder_of(process)
    if end == "replaced":  # another process has the number now
        holder = holder._replace(started=f"{int(holder.started) - 1}")
    else:
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    if end == "waited for":
        process.wait()
    put(path, holder)
    lock = locks.take_over(path) if how == "sweep" else locks._acquire(path, patient=0)
    assert lock.is_inherited
    assert clock.sleeps == 0
    lock.confirm()
    lock.release()


def generation(path):
    return path.store.read(path.key + locks.LOCK).generation


def remove(path):
    """Removes the object, as a process does that has taken the lock over."""
    path.store.delete(path.key + locks.LOCK)


@pytest.mark.parametrize("late_secs", [0.0, 0.5])
def test_renews_only_old_lock_before_request(path, clock, late_secs):
    lock = locks._acquire(path, patient=False)
    before = generation(path)
    clock.now += locks._FRESH_SECS + late_secs
    lock.check()
    assert (generation(path) != before) is (late_secs > 0)
    clock.now -= late_secs
    before = generation(path)
    lock.check()
    assert generation(path) == before
    lock.release()


def test_notices_pause_during_renewal_before_request(path, clock, monkeypatch):
    lock = locks._acquire(path, patient=False)
    real, pauses = seams.current("bucket.exchange"), [100.0]

    def exchange(*args):
        clock.now += pauses.pop() if pauses else 0.0
        return real(*args)

    seams.replace(monkeypatch, "bucket.exchange", exchange)
    clock.now += locks._FRESH_SECS + 1
    lock.check()
    assert clock.now - lock._holder.beat <= locks._FRESH_SECS
    lock.release()


@pytest.mark.parametrize("is_known", [False, True])
def test_notices_lost_lock_before_request(path, clock, is_known):
    lock = locks._acquire(path, patient=False)
    remove(path)
    if is_known:
        assert not lock._renew()
    else:
        clock.now += locks._FRESH_SECS + 1
    with pytest.raises(errors.CheckpointExistsError, match="taken over"):
        lock.check()
    lock.release()


@pytest.mark.parametrize("secs", [0, 45, 46, "known"])
def test_leaving_restores_lost_lock_after_long_pause_or_if_known(path, clock, secs):
    """Nobody takes over a younger lock, so it is known to be there."""
    lock = locks._acquire(path, patient=False)
    lock.leave()
    remove(path)
    if secs == "known":
        assert not lock._renew()
    else:
        clock.now += secs
    lock.release()
    assert locks.is_locked(path) is (secs in (46, "known"))


def test_own_lock_is_dead_if_neither_held_nor_left(path, clock):
    clock.now = 0.5  # as after the start of a machine
    put(path, locks._self())
    assert locks._status(path.store.read(path.key + locks.LOCK)) == "dead"


def kill(process, path, *, beat, until=0.0):
    """Leaves the lock of a process that is killed, last renewed at `beat`."""
    put(path, holder_of(process)._replace(beat=beat, until=until))
    process.kill()
    process.wait()


def release(lock):
    lock.is_left = False
    lock.release()


def test_keeps_lock_if_late_requests_may_have_arrived(path, clock, process):
    kill(process, path, beat=990)
    lock = locks.take_over(path)
    clock.now = 1100  # it looked for objects before
    release(lock)
    assert locks.is_locked(path)
    release(locks.take_over(path))
    assert not locks.is_locked(path)


@pytest.mark.parametrize("how", ["lock", "sweep"])
def test_keeps_lock_while_late_requests_may_arrive(path, clock, process, how):
    kill(process, path, beat=990)  # its last request may have been sent at 1005
    release(
        locks.take_over(path) if how == "sweep" else locks._acquire(path, patient=0)
    )
    assert read(path)["until"] == 1035
    clock.now = 1034.9
    assert locks.take_over(path) is None, "a sweep does not remove it yet"
    clock.now = 1035
    release(locks.take_over(path))
    assert not locks.is_locked(path)


def test_releases_lock_of_long_dead_holder(path, clock, process):
    kill(process, path, beat=955)
    release(locks.take_over(path))
    assert not locks.is_locked(path)


def test_acquires_kept_lock_at_once(path, clock, process):
    kill(process, path, beat=1000)
    release(locks.take_over(path))
    for now in (1001, 1044):
        clock.now = now
        with locks.lock(path) as lock:
            assert lock.is_inherited
            lock.is_left = False
        assert read(path)["until"] == 1045, "no time is added"
    clock.now = 1045
    with locks.lock(path) as lock:
        lock.is_left = False
    assert not locks.is_locked(path)
    assert clock.sleeps == 0


def test_time_for_late_requests_outlasts_new_holder(path, clock, process):
    kill(process, path, beat=900, until=1020)
    release(locks.take_over(path))
    assert read(path)["until"] == 1020


def test_acquires_lock_kept_elsewhere_and_keeps_it(path, clock):
    put(path, ELSEWHERE._replace(beat=7, until=9e9, is_free=True))
    with locks.lock(path) as lock:
        assert lock.is_inherited
        lock.is_left = False
    assert clock.sleeps == 0
    assert read(path)["until"] == 1030, "by the clock of this machine"


def test_sweep_watches_lock_kept_elsewhere(path, clock):
    put(path, ELSEWHERE._replace(until=9e9, is_free=True))
    assert locks.take_over(path) is None
    clock.now += 46
    release(locks.take_over(path))
    assert not locks.is_locked(path)


@pytest.mark.parametrize("until", [1e308, float("inf"), float("nan"), True])
def test_odd_times_never_keep_lock_forever(path, clock, until):
    free = locks._self()._replace(pid=1, until=until, is_free=True)
    put(path, free)
    for _ in range(3):
        if (lock := locks.take_over(path)) is not None:
            release(lock)
        clock.now += 46
    assert not locks.is_locked(path)


@pytest.mark.parametrize("field", ["beat", "until"])
@pytest.mark.parametrize("value", ["x", None, [], 10**400])
def test_lock_with_non_numeric_times_is_unreadable(path, field, value):
    content = json.dumps({**locks._self()._asdict(), field: value}).encode()
    assert locks._holder(types.SimpleNamespace(value=content)) is None


@pytest.mark.parametrize("holder", HOLDERS.values(), ids=HOLDERS)
def test_sweep_takes_over_stale_lock(path, clock, holder):
    put(path, holder)
    for secs in (0, 20, 24):
        clock.now += secs
        assert locks.take_over(path) is None
    put(path, holder)  # it lives, and the time begins anew
    for secs in (2, 44):
        clock.now += secs
        assert locks.take_over(path) is None
    clock.now += 2
    assert [*locks._seen] == [f"{path}"], "of a renewed lock, one time is kept"
    lock = locks.take_over(path)
    assert not locks._seen
    assert lock.is_inherited
    lock.confirm()
    lock.release()


def test_late_sweep_takes_over_nothing(path, clock, monkeypatch):
    put(path, ELSEWHERE)
    locks.take_over(path)
    clock.now += 46
    be_late(monkeypatch)
    assert locks.take_over(path) is None
    assert read(path)["id"] == "quicker"


# ---- processes --------------------------------------------------------------------


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="no /proc")
def test_start_time_identifies_process(process):
    [booted] = [
        int(line.split()[1])
        for line in Path("/proc/stat").read_text().splitlines()
        if line.startswith("btime")
    ]
    begin = booted + int(locks._started(process.pid)) / os.sysconf("SC_CLK_TCK")
    assert abs(begin - time.time()) < 600
    assert locks._started(process.pid) == locks._started(process.pid)
    assert locks._started(2**22 + 1) == ""
    process.send_signal(signal.SIGKILL)
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert locks._started(process.pid) == "", "a zombie"


@pytest.mark.skipif(not Path("/proc/self/ns/pid").exists(), reason="no /proc")
def test_boot_and_process_namespace_identify_machine():
    name = locks._machine()
    assert Path("/proc/sys/kernel/random/boot_id").read_text().strip() in name
    assert f"{Path('/proc/self/ns/pid').readlink()}" in name


def test_host_name_identifies_machine_without_proc(monkeypatch):
    for name in ("read_text", "readlink"):
        system_calls.fail(monkeypatch, Path, name, errno.ENOENT)
    assert locks._machine() == socket.gethostname()


@pytest.mark.parametrize(("look", "slow"), [("acquire", 4), ("sweep", 2)])
def test_outage_does_not_count_as_death_of_lock_holder(monkeypatch, look, slow):
    """Whoever holds it could not renew it, either."""
    path = faulty.new_path("restarts-lock") / "1"
    real, now, reads = seams.current("bucket.read"), [0.0], []
    clock = types.SimpleNamespace(
        monotonic=lambda: now[0], sleep=lambda secs: now.append(now.pop() + secs)
    )
    seams.replace(monkeypatch, "locks.time", clock)
    seams.replace(monkeypatch, "locks.machine", lambda: "the holder's")
    with locks.lock(path) as lock:
        seams.replace(monkeypatch, "locks.machine", lambda: "another")

        def read(store, key, **given):
            found = real(store, key, **given)
            reads.append(key)
            if len(reads) == slow:
                now.append(now.pop() + 59.0)  # as long as a request may take
            if len(reads) == slow + 1:
                assert lock._renew()  # the store is back
                found = real(store, key, **given)
            return found

        seams.replace(monkeypatch, "bucket.read", read)
        if look == "acquire":
            with pytest.raises(errors.CheckpointExistsError), locks.lock(path):
                pass
        else:
            assert [locks.take_over(path) for _ in range(3)] == [None] * 3
        assert len(reads) > slow
        lock.confirm()


def test_lock_in_missing_bucket_raises_error_in_time(store_path):
    store_path("moto")
    options = flaxckpt.StoreOptions(deadline_secs=3, retries=1)
    flaxckpt.set_store_options("s3://deleted", options)
    with (
        pytest.raises(errors.StoreError, match="check that the bucket exists") as told,
        locks.lock(_storage.paths.resolve("s3://deleted/run/1")),
    ):
        pass
    flaxckpt.set_store_options("s3://deleted", None)
    assert "within 3 s" in str(told.value)
