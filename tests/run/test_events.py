"""What happens to a checkpoint is told once, to whoever listens, and costs no save."""

import json
import logging
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import jax.numpy as jnp
import orbax.checkpoint as ocp
import pytest
from hypothesis import given
from hypothesis import strategies as st

import flaxckpt
from flaxckpt import errors
from flaxckpt.policies import LatestN
from tests.helpers import command_line, run_files, seams, strategies


def state(step):
    return {"w": jnp.full((4, 4), float(step)), "step": step}


def told(events):
    return [(event.kind, event.step) for event in events]


@pytest.fixture
def stream(tmp_path):
    return flaxckpt.Checkpointer(tmp_path).events


# ---- what is told ------------------------------------------------------------------


def test_run_emits_events_for_saves_deletions_and_restores(tmp_path):
    seen = []
    with flaxckpt.Checkpointer(tmp_path, keep=[LatestN(1)], sinks=[seen.append]) as c:
        c.save(1, state(1), metrics={"loss": 1.0})
        result = c.save(2, state(2)).wait()
        c.restore()
        c.save(2, state(2), on_exists="skip")
    assert told(seen) == [
        ("started", 1),
        ("snapshot", 1),
        ("committed", 1),
        ("started", 2),
        ("snapshot", 2),
        ("committed", 2),
        ("deleted", 1),
        ("restored", 2),
        ("skipped", 2),
    ]
    started, _, first, _, snapshot, committed, deleted, restored, skipped = seen
    assert started.details == {"overwrite": False, "bytes": 4 * 4 * 4 + 8, "leaves": 2}
    assert first.details["metrics"] == {"loss": 1.0}
    assert committed.details["bytes"] == result.bytes_written
    assert committed.details["blocked_secs"] == result.blocked_secs
    assert committed.details["total_secs"] <= result.total_secs
    assert snapshot.details == {"blocked_secs": result.blocked_secs}
    assert committed.path == restored.path == str(tmp_path / "2")
    assert restored.details["bytes"] == started.details["bytes"]
    assert deleted.path == str(tmp_path / "1")
    assert deleted.details == {"reason": "no policy keeps it"}
    assert skipped.details == {"reason": "step 2 exists"}
    recorded = run_files.read_events(tmp_path)
    assert seen == [event for event in recorded if event.kind != "configured"]
    assert seen == sorted(seen, key=lambda event: event.time)


def test_failed_save_emits_reason(tmp_path, monkeypatch):
    def fail(path):
        raise OSError(28, "No space left on device")

    seen = []
    with flaxckpt.Checkpointer(tmp_path, sinks=[seen.append]) as ckpt:
        with pytest.raises(errors.UnsupportedLeafError):
            ckpt.save(1, {"f": object()})
        seams.replace(monkeypatch, "disk.sync_tree", fail)
        ckpt.save(2, state(2))
        with pytest.raises(errors.SaveFailedError):
            ckpt.wait()
    assert told(seen) == [("failed", 1), ("started", 2), ("snapshot", 2), ("failed", 2)]
    assert "f: found a builtins.object" in seen[0].details["error"]
    assert "No space left" in seen[-1].details["error"]
    assert seen == run_files.read_events(tmp_path)


def test_emits_events_for_damaged_step_and_source(tmp_path):
    flaxckpt.save(tmp_path / "source", state(0))
    seen = []
    with flaxckpt.Checkpointer(tmp_path / "run", sinks=[seen.append]) as ckpt:
        callback = flaxckpt.CheckpointCallback(ckpt, every_steps=1)
        callback.restore_or_init(state(1), source=tmp_path / "source")
        for step in (1, 2):
            ckpt.save(step, state(step)).wait()
        (tmp_path / "run/2/state/_METADATA").unlink()
        ckpt.restore()
        ckpt.delete(2)
    assert [event.path for event in seen if event.kind == "restored"] == [
        str(tmp_path / "source"),
        str(tmp_path / "run/1"),
    ]
    assert told(seen)[-4:] == [
        ("fell_back", 2),
        ("restored", 1),
        ("found_damaged", 2),
        ("deleted", 2),
    ]
    [fell_back] = [event for event in seen if event.kind == "fell_back"]
    assert "is not a checkpoint" in fell_back.details["error"]
    assert "\n" not in fell_back.details["error"]


# ---- sinks -------------------------------------------------------------------------


class Wandb:
    def __init__(self):
        self.calls = []

    def log(self, data, step=None):
        self.calls.append((step, data))


class Mlflow:
    def __init__(self):
        self.calls = []

    def log_metrics(self, metrics, step=None):
        self.calls.append((step, metrics))


class Tensorboard:
    def __init__(self):
        self.calls = []

    def add_scalar(self, tag, value, step):
        self.calls.append((step, {tag: value}))


class Clu:
    def __init__(self):
        self.calls = []

    def write_scalars(self, step, scalars):
        self.calls.append((step, scalars))


@pytest.mark.parametrize("kind", [Wandb, Mlflow, Tensorboard, Clu])
def test_loggers_get_numbers_at_step_of_caller(tmp_path, kind):
    sink = kind()
    with flaxckpt.Checkpointer(tmp_path, keep=[LatestN(1)], sinks=[sink]) as ckpt:
        ckpt.save(1, state(1))
        ckpt.save(2, state(2)).wait()
        ckpt.events.deliver(7)
    assert [step for step, _ in sink.calls] == sorted(step for step, _ in sink.calls)
    assert {step for step, _ in sink.calls} == {1, 2, 7}
    numbers = {}
    for _, scalars in sink.calls:
        numbers |= scalars
    assert numbers.keys() == {
        f"checkpoint/{name}"
        for name in ("blocked_secs", "total_secs", "bytes", "bytes_per_sec", "deleted")
    }
    assert numbers["checkpoint/deleted"] == 1
    assert all(isinstance(value, int | float) for value in numbers.values())


def test_logger_steps_never_decrease_unless_caller_does(stream):
    sink = Wandb()
    stream.subscribe(sink)
    for step in (5, None):
        stream.emit("failed", 3)
        stream.deliver(step)
    stream.emit("failed", 9)
    stream.deliver()
    stream.emit("failed", 3)
    stream.deliver(2)
    assert sink.calls == [
        (step, {"checkpoint/failed": n + 1}) for n, step in enumerate([5, 5, 9, 2])
    ]


def test_sinks_run_only_on_callers_thread(tmp_path):
    threads = set()

    def sink(event):
        threads.add(threading.current_thread())

    with flaxckpt.Checkpointer(tmp_path, sinks=[sink]) as ckpt:
        for step in (1, 2, 3):
            ckpt.save(step, state(step))
    assert threads == {threading.current_thread()}


def test_sink_added_twice_gets_each_event_once(stream):
    seen = []
    writer = Wandb()
    for sink in (seen.append, seen.append, writer, writer):
        stream.subscribe(sink)
    stream.emit("failed", 1)
    stream.deliver()
    assert len(seen) == len(writer.calls) == 1


def test_two_equal_sinks_each_get_every_event(stream):
    class Seen(list):
        def __call__(self, event):
            self.append(event)

    first, second = Seen(), Seen()
    assert first == second
    stream.subscribe(first)
    stream.subscribe(second)
    stream.emit("failed", 1)
    stream.deliver()
    assert len(first) == len(second) == 1


@pytest.mark.parametrize("sink", [3, "writer", Wandb, logging.getLogger("x"), None])
def test_rejects_invalid_sinks_before_making_directory(tmp_path, sink):
    with pytest.raises(errors.OptionError) as info:
        flaxckpt.Checkpointer(tmp_path / "run", sinks=[sink])
    for shape in ("Event", "write_scalars", "log(", "log_metrics", "add_scalar"):
        assert shape in str(info.value)
    assert not (tmp_path / "run").exists()


def test_failing_sink_is_reported_and_fails_no_save(tmp_path, caplog):
    def bad(event):
        raise ZeroDivisionError("in the sink")

    seen = []
    with flaxckpt.Checkpointer(tmp_path, sinks=[bad, seen.append]) as ckpt:
        for step in (1, 2):
            ckpt.save(step, state(step))
    assert ckpt.steps() == [1, 2]
    assert len(seen) == 6
    first, last = [r for r in caplog.records if "bad" in r.getMessage()]
    assert isinstance(first.exc_info[1], ZeroDivisionError)
    assert "5 more times" in last.getMessage()


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
def test_interrupt_in_sink_propagates(stream, tmp_path, kind):
    def interrupt(event):
        raise kind

    seen = []
    stream.subscribe(interrupt)
    stream.subscribe(seen.append)
    stream.emit("failed", 1)
    stream.emit("failed", 2)
    with pytest.raises(kind):
        stream.deliver()
    with pytest.raises(kind):
        stream.deliver()
    assert len(run_files.read_events(tmp_path)) == 2


def test_sink_may_use_checkpointer(tmp_path):
    def sink(event):
        seen.append(event)
        if event.kind == "committed":
            ckpt.pin(event.step)
            ckpt.wait()

    seen = []
    with flaxckpt.Checkpointer(tmp_path, keep=[LatestN(1)], sinks=[sink]) as ckpt:
        for step in (1, 2, 3):
            ckpt.save(step, state(step)).wait()
            ckpt.wait()
    assert ckpt.steps() == [1, 2, 3]
    assert len(seen) == 9


def test_close_waits_for_saves_of_sinks(tmp_path):
    def sink(event):
        if event.kind == "committed" and event.step < 4:
            ckpt.save(event.step + 1, state(event.step + 1))

    with flaxckpt.Checkpointer(tmp_path, sinks=[sink]) as ckpt:
        ckpt.save(1, state(1))
    assert ckpt.steps() == [1, 2, 3, 4]
    assert not ckpt._saves.is_under_way()
    with flaxckpt.CheckpointCallback(ckpt) as callback:
        ckpt.restore(step=1)
        callback.close()

    def fail():
        with ckpt:
            ckpt.save(1, state(1), on_exists="overwrite")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert not ckpt._saves.is_under_way()


def test_close_stops_endlessly_saving_sink(tmp_path, caplog):
    def sink(event):
        if event.kind == "committed":
            ckpt.save(event.step + 1, state(0))

    with flaxckpt.Checkpointer(tmp_path, sinks=[sink]) as ckpt:
        ckpt.save(1, state(0))
    assert not ckpt._saves.is_under_way()
    assert len(ckpt.steps()) < 100


def test_threads_neither_lose_nor_repeat_events(stream, tmp_path):
    seen = []
    stream.subscribe(lambda event: seen.append(event.step))

    def work(first):
        for step in range(first, first + 200):
            stream.emit("failed", step)
            stream.deliver()

    threads = [threading.Thread(target=work, args=(n * 200,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(seen) == list(range(800))
    assert sorted(e.step for e in run_files.read_events(tmp_path)) == list(range(800))


# ---- the journal -------------------------------------------------------------------


def test_first_event_creates_journal_and_later_ones_append(tmp_path):
    with flaxckpt.Checkpointer(tmp_path) as ckpt:
        assert not list(tmp_path.iterdir())
        ckpt.save(1, state(1))
    with flaxckpt.Checkpointer(tmp_path) as ckpt:
        ckpt.restore()
    lines = (tmp_path / "events.jsonl").read_text().splitlines()
    kinds = ["started", "snapshot", "configured", "committed", "restored"]
    assert [json.loads(line)["kind"] for line in lines] == kinds
    assert [event.kind for event in run_files.read_events(tmp_path)] == kinds


def test_reader_does_not_write_journal(tmp_path):
    with flaxckpt.Checkpointer(tmp_path) as ckpt:
        ckpt.save(1, state(1))
    before = (tmp_path / "events.jsonl").read_bytes()
    seen = []
    with flaxckpt.Checkpointer(tmp_path, read_only=True, sinks=[seen.append]) as ckpt:
        ckpt.restore()
    assert told(seen) == [("restored", 1)]
    assert (tmp_path / "events.jsonl").read_bytes() == before


ONE_OF_TWO = """
import sys
from pathlib import Path
import jax
rank, port, directory = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
jax.distributed.initialize(f"127.0.0.1:{port}", 2, rank)
import flaxckpt
stream = flaxckpt.Checkpointer(directory).events
seen = []
stream.subscribe(seen.append)
stream.emit("failed", rank)
stream.deliver()
assert [event.step for event in seen] == [rank], seen
"""


@pytest.mark.slow
@pytest.mark.multiprocess
def test_first_of_several_processes_writes_journal(tmp_path):
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", ONE_OF_TWO, str(rank), str(port), str(tmp_path)],
            env=os.environ | {"XLA_FLAGS": ""},
        )
        for rank in (0, 1)
    ]
    try:
        assert [process.wait(timeout=300) for process in processes] == [0, 0]
    finally:
        for process in processes:
            process.kill()
    assert told(run_files.read_events(tmp_path)) == [("failed", 0)]


def explain(path, step, code=0):
    return command_line.read_json("explain", path, step, code=code)


def test_truncated_line_spoils_no_other(stream, tmp_path):
    file = tmp_path / "events.jsonl"
    stream.emit("committed", 1)
    file.write_bytes(file.read_bytes() + file.read_bytes()[:-7])
    stream.emit("committed", 2)
    stream.emit("committed", 3)
    for step in (1, 2, 3):
        assert explain(tmp_path, step)["saved"] is not None


def line(**changes):
    """Returns a line of the journal, about step 9."""
    details = {"metrics": {"foreign": 1}}
    row = {"time": 1.0, "kind": "committed", "step": 9, "path": "", "details": details}
    return json.dumps(row | changes).encode()


@pytest.mark.parametrize(
    "foreign",
    [
        *(b"", b"not JSON", b"\xff\xfe", b"[" * 50_000, b"1" * 5_000),
        b'{"kind": "committed"}',
        *(line(kind="eaten"), line(step=True), line(time=float("inf"))),
        *(line(details=[]), b" " * 2**16 + line()),
    ],
)
def test_ignores_foreign_lines(stream, tmp_path, foreign):
    stream.emit("committed", 1)
    with (tmp_path / "events.jsonl").open("ab") as file:
        file.write(foreign + b"\n")
    stream.emit("committed", 2)
    for step in (1, 2):
        assert explain(tmp_path, step)["metrics"] == {}
    refused = command_line.run("explain", tmp_path, 9, code=2)
    assert "the nearest steps are 1, 2" in refused


@pytest.mark.parametrize("obstacle", ["directory", "fifo", "missing"])
def test_warns_once_about_unwritable_journal(tmp_path, caplog, obstacle):
    run = tmp_path / "run"
    ckpt = flaxckpt.Checkpointer(run)
    if obstacle == "directory":
        (run / "events.jsonl").mkdir()
    elif obstacle == "fifo":
        os.mkfifo(run / "events.jsonl")
    else:
        run.rmdir()
        ckpt.events.emit("failed", 0)
    ckpt.save(1, state(1))
    ckpt.save(2, state(2))
    ckpt.close()
    assert ckpt.steps() == [1, 2]
    assert caplog.text.count("events are missing") == 1


def test_journal_records_non_json_values_as_text(stream, tmp_path):
    class Odd:
        def __str__(self):
            raise ValueError("no text")

    number = jnp.float32(0.5)
    stream.emit("failed", 1, nan=float("nan"), path_=Path("a"), n=[number], m={1: (2,)})
    stream.emit("failed", 2, odd=Odd())
    stream.emit("failed", 3, long="x" * 10**6)
    first, last = run_files.read_events(tmp_path)
    assert first.details == {"nan": "nan", "path_": "a", "n": ["0.5"], "m": {"1": [2]}}
    assert (last.step, last.details) == (3, {})


@given(
    st.dictionaries(
        st.text().filter(lambda name: name not in ("kind", "step", "path", "self")),
        st.recursive(
            st.none()
            | st.booleans()
            | st.integers()
            | st.floats(allow_nan=False, allow_infinity=False)
            | st.text(),
            lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
            max_leaves=8,
        ),
        max_size=4,
    )
)
def test_details_round_trip_through_journal(tmp_path_factory, details):
    directory = tmp_path_factory.mktemp("run")
    stream = flaxckpt.Checkpointer(directory).events
    seen = []
    stream.subscribe(seen.append)
    stream.emit("preflight", **details)
    stream.deliver()
    assert seen == run_files.read_events(directory)
    assert seen[0].details == details


def test_orbax_and_step_search_ignore_journal(tmp_path):
    with flaxckpt.Checkpointer(tmp_path) as ckpt:
        for step in (1, 2):
            ckpt.save(step, state(step))
    with ocp.CheckpointManager(tmp_path) as manager:
        assert manager.all_steps() == [1, 2]
        manager.save(3, args=ocp.args.Composite(state=ocp.args.StandardSave(state(3))))
        manager.wait_until_finished()
        assert manager.restore(1)["state"]["step"] == 1
    assert flaxckpt.metadata(tmp_path).path == str(tmp_path / "3")
    strategies.assert_same(state(2), flaxckpt.load(tmp_path, step=2))
    with flaxckpt.Checkpointer(tmp_path) as ckpt:
        assert ckpt.steps() == [1, 2, 3]
        ckpt.restore()
    assert run_files.read_events(tmp_path)[-1].step == 3
