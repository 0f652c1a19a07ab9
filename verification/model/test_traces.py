"""What the real code does is a path of the models, wherever it is interrupted."""

import contextlib
import functools

import pytest

from flaxckpt import errors
from flaxckpt._storage import (
    commit_marker,
    files,
    leases,
    rename,
    temporary,
    transaction,
)
from tests.helpers import faulty_store, seams
from verification.model import commit, observe, reading, replace
from verification.model.engine import Event, refused


@pytest.fixture(autouse=True)
def still():
    with observe.still():
        yield


# ---- commit markers and locks, in a bucket ----------------------------------------


def is_unseen_in_store(event: Event) -> bool:
    """Returns True for events without a request that tells them apart."""
    return (
        event.actor == "time"
        or event.text.startswith(("sees", "removes", "finds the lock"))
        or event.text == "is refused the lock"
    )


def write(path, text, *, overwrite):
    with commit_marker.new_checkpoint(
        path, overwrite=overwrite, keep=lambda name: False
    ):
        for name in ("data", "manifest"):
            commit_marker.write_new(path / name, text)
        commit_marker.commit(path, text)


def sweep(path):
    for _ in range(2):  # the first time, it sees the lock for the first time
        commit_marker.sweep(path.parent, lambda name: True)


IN_STORE = {
    "save": lambda path, text: write(path, text, overwrite=False),
    "overwrite": lambda path, text: write(path, text, overwrite=True),
    "delete": lambda path, text: transaction.delete(path, lambda now: None),
    "sweep": lambda path, text: sweep(path),
}


def store_trace(first, second, *, at, pause, has_step=False):
    """Returns the events of two operations, and whether actor 1 was interrupted.

    Actor 1 is "paused" or "killed"; or "dead", which actor 2 knows.
    """
    path = faulty_store.new_path("traces") / "1"
    if has_step:
        write(path, b"old", overwrite=False)
    connection = path.store.connection
    interrupted = []

    def act(operation, text):
        with contextlib.suppress(errors.CheckpointError):
            IN_STORE[operation](path, text)

    def interrupt(call):
        interrupted.append(True)
        if call == "list" and recorder.last() == "renews the lock":
            return pause != "paused"  # "prompt removals": nobody takes over here
        another = observe.here if pause == "dead" else observe.elsewhere
        with recorder.acting(2), another():
            act(second, b"second")
        return pause != "paused"

    recorder = observe.Recorder(first, second, at=at, interrupt=interrupt)
    real = connection.kv()
    connection._opened = observe.Store(real, recorder)
    with contextlib.ExitStack() as stack:
        stack.callback(setattr, connection, "_opened", real)
        if pause == "dead":
            stack.enter_context(observe.processes(recorder))
        with contextlib.suppress(observe.KilledError):
            act(first, b"first")
    return recorder.events, bool(interrupted)


def refusals(first, second, *, has_step, pause):
    """Yields why the trace is no path, for each interruption of actor 1."""
    model = commit.protocol(
        first, second, has_step=has_step, without=["prompt removals", "prompt marker"]
    )

    def is_unseen(event):
        takes_long = event.actor == "time" and event.text.startswith("passes")
        return is_unseen_in_store(event) and not (takes_long and pause == "dead")

    for at in range(1, 1000):
        events, was_interrupted = store_trace(
            first, second, at=at, pause=pause, has_step=has_step
        )
        if not was_interrupted:
            return
        why = refused(model, events, is_unseen)
        if why is not None:
            yield "\n".join([f"interrupted before {at}: {why}", *map(str, events)])
    raise AssertionError


@pytest.mark.sampled(5)
@pytest.mark.parametrize("has_step", [False, True])
@pytest.mark.parametrize("pause", ["paused", "killed", "dead"])
@pytest.mark.parametrize("second", IN_STORE)
@pytest.mark.parametrize("first", ["save", "overwrite", "delete"])
def test_model_accepts_traces_of_two_processes_in_bucket(
    first, second, pause, has_step
):
    found = refusals(first, second, has_step=has_step, pause=pause)
    assert not list(found)


@pytest.mark.parametrize(
    ("planted", "first", "second"),
    [
        ("replaces unasked", "save", "save"),
        ("reports unasked", "save", "sweep"),
        ("removes unasked", "delete", "sweep"),
        ("removes the marker last", "delete", "sweep"),
        ("writes the marker first", "save", "sweep"),
        ("does not wait", "save", "sweep"),
    ],
)
def test_model_rejects_traces_of_planted_faults(planted, first, second, monkeypatch):
    real = seams.current("commit_marker.write_new")
    if planted == "replaces unasked":
        seams.replace(monkeypatch, "commit_marker.lock_around", lambda path: None)
    elif planted == "reports unasked":

        def hasty(path, marker):
            commit_marker._locks[path].confirm()
            real(path / commit_marker.MARKER, marker)

        seams.replace(monkeypatch, "commit_marker.commit", hasty)
    elif planted == "removes unasked":
        seams.replace(monkeypatch, "locks.confirm", lambda lock: None)
    elif planted == "removes the marker last":
        seams.replace(monkeypatch, "commit_marker.withdraw", lambda lock: None)
    elif planted == "does not wait":
        seams.replace(monkeypatch, "locks.until", lambda lock: 0.0)
    else:

        def write_new(path, content):
            if path.name == "data":
                real(path.parent / commit_marker.MARKER, content)
            real(path, content)

        seams.replace(monkeypatch, "commit_marker.write_new", write_new)
    pause = "dead" if planted == "does not wait" else "paused"
    found = refusals(first, second, has_step=first == "delete", pause=pause)
    assert next(found, None) is not None


# ---- readers and deletions, in a directory ----------------------------------------


def read(path, recorder):
    lease = leases.Lease(path)
    try:
        if not leases.is_being_deleted(path):
            recorder.emit("has read the step")
    finally:
        lease.release()


def interrupted(recorder, acts, *, is_killed):
    """Performs both operations, the second where the first is interrupted or ends."""
    is_over = []

    def act(number):
        with (
            contextlib.suppress(errors.CheckpointError, OSError, observe.KilledError),
            recorder.acting(number),
        ):
            acts[number - 1]()

    def interrupt(call):
        is_over.append(True)
        if not is_killed:
            act(2)
        return is_killed

    recorder.interrupt = interrupt
    act(1)
    if is_killed or not is_over:
        act(2)
    return bool(is_over)


def directory_refusals(root, *kinds, is_killed):
    """Yields why a trace is no path, for each interruption of actor 1."""
    model = reading.protocol(*kinds, in_store=False)
    for at in range(1, 1000):
        path = root / str(at) / "1"
        path.mkdir(parents=True)
        (path / "data").write_text("x")
        recorder = observe.Recorder(*kinds, at=at)
        operations = {
            "reader": functools.partial(read, path, recorder),
            "deleter": functools.partial(transaction.delete, path, lambda now: None),
        }
        acts = [operations[kind] for kind in kinds]
        with observe.system_calls(recorder, observe.Step(path, recorder)):
            is_over = interrupted(recorder, acts, is_killed=is_killed)
        why = refused(model, recorder.events, lambda event: event.actor == "time")
        if why is not None:
            yield "\n".join(
                [f"interrupted before {at}: {why}", *map(str, recorder.events)]
            )
        if not is_over:
            return
    raise AssertionError


@pytest.mark.parametrize("is_killed", [False, True], ids=["paused", "killed"])
@pytest.mark.parametrize(
    "kinds", [("reader", "deleter"), ("deleter", "reader"), ("deleter", "deleter")]
)
def test_model_accepts_traces_of_readers_and_deleters(tmp_path, kinds, is_killed):
    assert not list(directory_refusals(tmp_path, *kinds, is_killed=is_killed))


# ---- replacements and sweeps ------------------------------------------------------


def is_unseen_replacement(event):
    """Returns True for events without a call that tells them apart."""
    if event.actor == "time":
        return event.text != "cuts the power"
    return event.text in (
        "lists",
        "claims the step",
        "claims",
        "skips",
        "ends",
        "finds a step",
        "finds no step",
        "finds nothing",
        "sees no step",
        "removes its directory",
    )


def replace_refusals(root, *, can_exchange, is_killed, is_first):
    """Yields why a trace is no path, for each interruption of actor 1.

    Args:
        root: For the directories.
        can_exchange: Whether the system exchanges two names.
        is_killed: Whether actor 1 is killed, or paused.
        is_first: Whether actor 1 is the overwriter, or the sweeper.
    """
    kinds = ("overwriter", "sweeper") if is_first else ("sweeper", "overwriter")
    model = replace.protocol(*kinds, can_exchange=can_exchange)
    for at in range(1, 1000):
        final = root / str(at) / "1"
        new = temporary.new_path(final, temporary.WRITING)
        for path in (final, new):
            path.mkdir(parents=True)
            (path / "data").write_text(path.name)
        recorder = observe.Recorder(*kinds, at=at)
        names = observe.Names(final, new, recorder)

        lock = contextlib.ExitStack()
        lock.enter_context(temporary.claim(new))

        def overwrite(final=final, new=new, recorder=recorder, lock=lock):
            with lock:
                transaction.replace(new, final, lambda name: False)
                temporary.discard(new)
                recorder.emit("reports")

        def sweep(final=final):
            temporary.sweep(final.parent, lambda name: True)

        with (
            pytest.MonkeyPatch.context() as patch,
            observe.system_calls(recorder, names),
        ):
            swap = names.exchange if can_exchange else lambda one, other: False
            patch.setattr(rename, "exchange_atomically", swap)
            # The model's sweeper looks at the new directory first.
            patch.setattr(files, "directories", in_order)
            acts = [overwrite, sweep] if is_first else [sweep, overwrite]
            is_over = interrupted(recorder, acts, is_killed=is_killed)
        why = refused(model, recorder.events, is_unseen_replacement)
        if why is not None:
            yield "\n".join(
                [f"interrupted before {at}: {why}", *map(str, recorder.events)]
            )
        if not is_over:
            return
    raise AssertionError


def in_order(path, real=files.directories):
    return sorted(real(path), reverse=True)


@pytest.mark.parametrize("is_first", [True, False], ids=["overwriter", "sweeper"])
@pytest.mark.parametrize("is_killed", [False, True], ids=["paused", "killed"])
@pytest.mark.parametrize("can_exchange", [True, False], ids=["exchange", "two renames"])
def test_model_accepts_traces_of_overwriters_and_sweepers(
    tmp_path, can_exchange, is_killed, is_first
):
    found = replace_refusals(
        tmp_path, can_exchange=can_exchange, is_killed=is_killed, is_first=is_first
    )
    assert not list(found)


def sync_too_early(patch):
    """As a sweep once was: it synced the names before it claimed anything."""
    real_claim, real_sync = temporary.claim, files.sync_directory

    @contextlib.contextmanager
    def claim(path):
        real_sync(path.parent)
        with real_claim(path) as is_ours:
            yield is_ours

    patch.setattr(temporary, "claim", claim)
    patch.setattr(files, "sync_directory", lambda path: None)


PLANTED_IN_REPLACEMENTS = {
    "sweep syncs too early": sync_too_early,
    "sweep restores nothing": lambda patch: patch.setattr(
        temporary, "_remove_or_restore", files.remove_tree
    ),
    "publishes without a sync": lambda patch: patch.setattr(
        rename, "_settle", lambda final, undo: None
    ),
    "sweep ignores locks": lambda patch: patch.setattr(
        temporary, "_lock", lambda descriptor, patience_secs: True
    ),
}


@pytest.mark.parametrize("planted", PLANTED_IN_REPLACEMENTS)
def test_model_rejects_traces_of_faulty_replacements(tmp_path, monkeypatch, planted):
    PLANTED_IN_REPLACEMENTS[planted](monkeypatch)
    found = [
        why
        for number, is_killed in enumerate((False, True))
        for why in replace_refusals(
            tmp_path / f"{number}",
            can_exchange=False,
            is_killed=is_killed,
            is_first=True,
        )
    ]
    assert found


@contextlib.contextmanager
def unannounced(path):
    """Looks before it announces."""
    if present := leases.readers(path):
        raise leases.in_use_error(path, present)
    (path / leases.DELETING).touch()
    yield


PLANTED_IN_DELETIONS = {
    "looks before it announces": ("leases.deletion", unannounced),
    "looks for no reader": ("leases.readers", lambda path: []),
    "looks for no deletion": (
        "leases.is_being_deleted",
        lambda path: not path.is_dir(),
    ),
}


@pytest.mark.parametrize("planted", PLANTED_IN_DELETIONS)
def test_model_rejects_traces_of_faulty_deletions(tmp_path, monkeypatch, planted):
    seams.replace(monkeypatch, *PLANTED_IN_DELETIONS[planted])
    found = [
        why
        for kinds in (("deleter", "reader"), ("reader", "deleter"))
        for why in directory_refusals(tmp_path / kinds[0], *kinds, is_killed=False)
    ]
    assert found
