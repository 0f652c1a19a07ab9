"""One of several processes of a job.

    python program.py SCENARIOS RANK COUNT PORT DIRECTORY ARGUMENTS

Does the scenarios, each in a directory of its own, and prints what it has found, as
JSON. Of several, separated by commas, the names are keys.
"""

import contextlib
import json
import os
import resource
import sys
import threading
import time
import traceback
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

names, rank, count, port, where, arguments = sys.argv[1:]
RANK, COUNT, DIRECTORY, GIVEN = (
    int(rank),
    int(count),
    Path(where),
    json.loads(arguments),
)
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.config.update("jax_threefry_partitionable", True)
if COUNT > 1:
    jax.distributed.initialize(f"127.0.0.1:{port}", COUNT, RANK)

import flaxckpt  # noqa: E402
from flaxckpt import errors, transforms  # noqa: E402
from flaxckpt._arrays import read as arrays_read  # noqa: E402
from flaxckpt._checkpoint import commit as checkpoint_commit  # noqa: E402
from flaxckpt._checkpoint import save_distributed as checkpoint_save_distributed  # noqa: E402
from flaxckpt._distributed import heartbeat as distributed_heartbeat  # noqa: E402
from flaxckpt._distributed import key_value as distributed_key_value  # noqa: E402
from flaxckpt._distributed import operation as distributed_operation  # noqa: E402
from flaxckpt.policies import LatestN  # noqa: E402
from tests.distributed import states  # noqa: E402
from tests.helpers import chunks  # noqa: E402

distributed_operation.USES_FILES = GIVEN.get("files", False)
distributed_heartbeat.SILENT_SECS = GIVEN.get("silent_secs", 60.0)

LAYOUTS = {
    "chunks": flaxckpt.ArrayLayout(chunk_bytes=2**20),
    "default": flaxckpt.ArrayLayout(),
    "zstd": flaxckpt.ArrayLayout(codec="zstd"),
    "compact": flaxckpt.ArrayLayout(codec="compact"),
}
MESHES = ("rows", "columns", "mixed", "replicated")


def say(**found):
    sys.stdout.write(json.dumps(found) + "\n")
    sys.stdout.flush()


@contextlib.contextmanager
def raising(kind):
    """Notes what the block raises, which must be of a kind."""
    told = []
    try:
        yield told
    except kind as error:
        told += [type(error).__name__, str(error)]
    else:
        raise AssertionError(f"no {kind.__name__}")


# ---- saving and restoring ----------------------------------------------------------


def save():
    """Every layout from every mesh; each is read again on the next mesh."""
    results = []
    for number, layout in enumerate(GIVEN["layouts"]):
        mesh, other = MESHES[number % 4], MESHES[(number + 1) % 4]
        with flaxckpt.Checkpointer(
            DIRECTORY / layout,
            layout=LAYOUTS[layout],
            permissions=GIVEN.get("permissions"),
            snapshot=GIVEN.get("snapshot", "host"),
        ) as ckpt:
            for step in (1, 2):
                handle = ckpt.save(
                    step,
                    states.everything(step, mesh),
                    metrics={"loss": 1 / step},
                    on_exists="skip",
                )
                results.append(handle.wait().bytes_written)
            state, found = ckpt.restore_latest(states.abstract(other))
            assert found == 2
            states.check(state, 2, other)
            states.check(ckpt.restore(states.abstract(mesh), step=1), 1, mesh)
    say(bytes=results)


def items():
    """Steps of several items, with a dataset and JSON, of which an item goes later."""
    for number, layout in enumerate(GIVEN["layouts"]):
        mesh, other = MESHES[number % 4], MESHES[(number + 1) % 4]

        def split(state):
            rest = {name: state[name] for name in state if name != "arrays"}
            return {"arrays": state["arrays"], "rest": rest}

        with flaxckpt.Checkpointer(
            DIRECTORY / layout,
            layout=LAYOUTS[layout],
            items=("arrays", "rest"),
            dataset_item="iter",
            keep_items={"rest": [LatestN(1)]},
        ) as ckpt:
            for step in (1, 2):
                state = split(states.everything(step, mesh))
                data = flaxckpt.datasets.StepIndexed(lambda i: i)
                next(data)
                ckpt.save(step, state, dataset=data, json={"config": {"seed": step}})
            ckpt.wait()
            found = ckpt.restore(split(states.abstract(other)), dataset=data)
            states.check({"arrays": found["arrays"], **found["rest"]}, 2, other)
            assert ckpt.metadata(1).items == ("arrays",)
            assert ckpt.metadata(1).json == {"config": {"seed": 1}}
    say(ok=True)


def bucket():
    """Steps in an object store, in all layouts, on changing meshes."""
    for number, layout in enumerate(GIVEN["layouts"]):
        mesh, other = MESHES[number % 4], MESHES[(number + 1) % 4]
        url = f"{GIVEN['url']}/{layout}"
        keep = [LatestN(2)]
        with flaxckpt.Checkpointer(url, layout=LAYOUTS[layout], keep=keep) as ckpt:
            for step in (1, 2, 3):
                handle = ckpt.save(step, states.everything(step, mesh))
                assert handle.wait().deleted_steps == ((1,) if step == 3 else ())
            state, found = ckpt.restore_latest(states.abstract(other))
            assert found == 3
            states.check(state, 3, other)
            with raising(errors.CheckpointExistsError):
                ckpt.save(3, states.everything(3, mesh))
        if RANK == 0:
            report = flaxckpt.verify(url)
            assert report.ok, report
    with flaxckpt.Checkpointer(f"{GIVEN['url']}/loop") as ckpt:
        on_step = flaxckpt.CheckpointCallback(ckpt, every_steps=2)
        for step in range(1, 5):
            on_step(step, {"w": halves(np.full((8, 2), step, np.float32))})
    assert ckpt.steps() == [2, 4]
    say(ok=True)


def restore():
    """What other processes have saved, on meshes of these."""
    for layout in GIVEN["layouts"]:
        with flaxckpt.Checkpointer(DIRECTORY / layout, read_only=True) as ckpt:
            for mesh in GIVEN["meshes"]:
                states.check(ckpt.restore(states.abstract(mesh)), 2, mesh)
    say(ok=True)


def halves(value, step=1):
    """An array of which each device has equally many rows, in the order of `step`."""
    devices = states.mesh("rows").devices[::step]
    sharding = NamedSharding(Mesh(devices, states.mesh("rows").axis_names), P("x"))
    return states.array(value, sharding)


def train():
    """Saves while the devices train: neither waits for the other.

    The last process writes only when all have trained on, and they train on only while
    it has not written.
    """
    real, may_write = checkpoint_save_distributed._write_part, threading.Event()

    def write_later(*args):
        assert may_write.wait(60)
        return real(*args)

    if RANK == COUNT - 1:
        checkpoint_save_distributed._write_part = write_later

    @jax.jit
    def step(state):
        mean = state["w"].mean()  # of all devices: a collective
        return {"w": state["w"] * 0.5 + mean, "n": state["n"] + 1}

    with flaxckpt.Checkpointer(
        DIRECTORY, snapshot=GIVEN.get("snapshot", "host")
    ) as ckpt:
        state = {"w": halves(np.arange(4096.0, dtype=np.float32).reshape(64, 64))}
        state["n"] = jnp.zeros((), jnp.int32)
        for number in range(1, 4):
            may_write.clear()
            state = step(state)
            handle = ckpt.save(number, state)
            kept = np.asarray(jax.jit(lambda w: w.sum(axis=1))(state["w"]).sum())
            for _ in range(25):
                state = step(state)
            jax.block_until_ready(state)
            assert not handle.done()
            may_write.set()
            handle.wait()
            found = ckpt.restore(jax.tree.map(jnp.zeros_like, state), step=number)
            assert np.asarray(found["w"].sum(axis=1).sum()) == kept
    say(steps=ckpt.steps())


def loading():
    """All compute together while a checkpoint is read, which is late in one process."""
    path, read, may_read = DIRECTORY / "c", arrays_read.read, threading.Event()
    flaxckpt.save(path, states.everything(1, "rows"))

    def read_later(*args):
        assert may_read.wait(60)
        return read(*args)

    if RANK == COUNT - 1:
        arrays_read.read = read_later
    mean = jax.jit(lambda x: x.mean())  # of all devices: a collective
    shared = halves(np.arange(4096.0, dtype=np.float32).reshape(64, 64))
    doubled = [transforms.map_leaf("arrays/large", lambda x: x * 2)]
    for once, changes in ((False, ()), (True, ()), (False, doubled)):
        may_read.clear()
        handle = flaxckpt.load_async(
            path, states.abstract("columns"), read_once=once, transforms=changes
        )
        for _ in range(25):
            assert mean(shared) == 2047.5
        may_read.set()
        state = handle.wait()
        if changes:
            large = state["arrays"]["large"]
            states.check_array(large, states.values(1)["large"] * 2)
        else:
            states.check(state, 1, "columns")
    say(ok=True)


def data():
    """Each process has its part of the data; and all go on in one, if it is elastic."""
    import grain

    from flaxckpt.datasets import StepIndexed

    def iterators():
        part = grain.MapDataset.range(100).seed(1).shuffle()[RANK::COUNT]
        return iter(part.to_iter_dataset()), StepIndexed(lambda i: 10 * i)

    mine, common = iterators()
    with flaxckpt.Checkpointer(DIRECTORY / "mine") as ckpt:
        [next(mine) for _ in range(5)]
        ckpt.save(1, {"w": jnp.ones(2)}, dataset=mine).wait()
        wanted = [int(next(mine)) for _ in range(3)]
        again, _ = iterators()
        ckpt.restore({"w": jnp.ones(2)}, dataset=again)
        assert [int(next(again)) for _ in range(3)] == wanted
    with flaxckpt.Checkpointer(DIRECTORY / "common") as ckpt:
        [next(common) for _ in range(5)]
        ckpt.save(1, {"w": jnp.ones(2)}, dataset=common).wait()
    with flaxckpt.Checkpointer(DIRECTORY / "first") as ckpt:
        ckpt.save(1, {"w": jnp.ones(2)}, dataset=common).wait()
        given = {"dataset": common} if RANK == 0 else {}
        ckpt.save(2, {"w": jnp.ones(2)}, **given).wait()
        with raising(errors.DatasetStateError) as told:  # and takes no older step
            ckpt.restore({"w": jnp.ones(2)}, dataset=iterators()[1])
        ckpt.restore({"w": jnp.ones(2)}, **given)
    say(next=wanted, told=told[1])


def sizes():
    """How much each process reads of an array that is split among them."""
    value = np.arange(2**22, dtype=np.float32).reshape(2048, 2048)  # 16 MiB
    with flaxckpt.Checkpointer(DIRECTORY, layout=LAYOUTS["chunks"]) as ckpt:
        state = {"w": halves(value)}
        ckpt.save(1, state).wait()
        before = bytes_read()
        found = ckpt.restore(state, memory_map=False)
        read = bytes_read() - before
        states.check_array(found["w"], value)
    # Chunks of columns, of which each process needs half of the rows.
    columns = NamedSharding(states.mesh("rows"), P(None, "x"))
    flaxckpt.save(DIRECTORY / "columns", {"w": states.array(value, columns)})
    wanted = {"w": halves(value)}
    before = bytes_read()
    found = flaxckpt.load(DIRECTORY / "columns", wanted, memory_map=False)
    parts = bytes_read() - before
    states.check_array(found["w"], value)
    say(share=read / value.nbytes, parts=parts / value.nbytes)


def share():
    """What all processes hold is written, and read, by one of them."""
    mesh = jax.make_mesh((COUNT, 2), ("data", "model"))

    def leaf(shape, *spec):
        sharding = NamedSharding(mesh, P(*spec))
        size = int(np.prod(shape))
        return states.array(np.arange(size, dtype=np.float32).reshape(shape), sharding)

    state = {
        "small": [leaf((100 + i, 128)) for i in range(40)],
        "halves": [leaf((64, 128 + 2 * i), "model") for i in range(10)],
        "odd": [leaf((1021, 409)), leaf((2 * 1021, 2 * 409), None, "model")],
        "large": leaf((2048, 2048)),
        "split": leaf((64, 64), "data", "model"),
        "n": 3,
    }
    abstract = AbstractMesh((COUNT, 2), ("data", "model"))
    planned = flaxckpt.simulate(
        jax.tree.map(
            lambda x: (
                x
                if isinstance(x, int)
                else jax.ShapeDtypeStruct(
                    x.shape, x.dtype, sharding=NamedSharding(abstract, x.sharding.spec)
                )
            ),
            state,
        ),
        processes=COUNT,
        layout=LAYOUTS["chunks"],
    )
    with flaxckpt.Checkpointer(DIRECTORY, layout=LAYOUTS["chunks"]) as ckpt:
        handle = ckpt.save(1, state)
        handle.wait()
        assert handle._counter.total == planned.written_bytes[RANK]
    shares = []
    for once in (False, True):
        with flaxckpt.Checkpointer(DIRECTORY, read_once=once) as ckpt:
            before = bytes_read()
            found = ckpt.restore({"large": state["large"]}, memory_map=False)
            shares.append((bytes_read() - before) / state["large"].nbytes)
            states.check_array(found["large"], np.asarray(state["large"]))
            assert found["large"].sharding == state["large"].sharding
    say(shares=shares, balance=planned.balance)


def bytes_read():
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(dict(line.split(": ") for line in lines)["rchar"])


# ---- with Orbax --------------------------------------------------------------------


def plain(seed):
    """What Orbax, too, saves of several processes."""
    found = states.everything(seed, "rows")
    arrays = {n: found["arrays"][n] for n in ("rows", "columns", "large", "replicated")}
    return {"arrays": arrays, "numpy": np.arange(6.0), "number": 7}


def check_plain(found, seed):
    for leaf in ("rows", "columns", "large", "replicated"):
        states.check_array(found["arrays"][leaf], states.values(seed)[leaf])
    np.testing.assert_array_equal(found["numpy"], np.arange(6.0))
    assert found["number"] == 7


def orbax():
    """Orbax restores what we save, and we what it saves, by all processes."""
    import orbax.checkpoint as ocp

    for layout in GIVEN["layouts"]:
        with flaxckpt.Checkpointer(DIRECTORY / layout, layout=LAYOUTS[layout]) as ckpt:
            ckpt.save(1, plain(1)).wait()
        with ocp.StandardCheckpointer() as theirs:
            found = theirs.restore(DIRECTORY / layout / "1" / "state", plain(0))
        check_plain(found, 1)
    with ocp.CheckpointManager(DIRECTORY / "theirs") as manager:
        manager.save(3, args=ocp.args.StandardSave(plain(3)))
    with flaxckpt.Checkpointer(DIRECTORY / "theirs", read_only=True) as ckpt:
        state, step = ckpt.restore_latest(plain(0))
    assert step == 3
    check_plain(state, 3)
    say(ok=True)


def handler():
    """Orbax's manager saves and restores items of flaxckpt, from all processes."""
    import orbax.checkpoint as ocp

    from flaxckpt.integrations.orbax import CheckpointHandler, RestoreArgs, SaveArgs

    for number, layout in enumerate(GIVEN["layouts"]):
        mesh, other = MESHES[number % 4], MESHES[(number + 1) % 4]
        for is_async in (True, False):
            options = ocp.CheckpointManagerOptions(
                enable_async_checkpointing=is_async, max_to_keep=2
            )
            with ocp.CheckpointManager(
                DIRECTORY / f"{layout}_{is_async}",
                item_handlers={
                    "state": CheckpointHandler(layout=LAYOUTS[layout]),
                    "ema": CheckpointHandler(),
                },
                options=options,
            ) as manager:
                for step in (1, 2, 3):
                    args = ocp.args.Composite(
                        state=SaveArgs(states.everything(step, mesh)),
                        ema=SaveArgs({"w": halves(np.full((8, 2), step, np.float32))}),
                    )
                    manager.save(step, args=args)
                manager.wait_until_finished()
                assert manager.all_steps() == [2, 3]
                args = ocp.args.Composite(
                    state=RestoreArgs(states.abstract(other)), ema=RestoreArgs()
                )
                found = manager.restore(3, args=args)
                states.check(found["state"], 3, other)
                np.testing.assert_array_equal(found["ema"]["w"], np.full((8, 2), 3))
    say(ok=True)


def handler_faults():
    """One process fails: each gets an error, and the next save is good."""
    import orbax.checkpoint as ocp

    from flaxckpt.integrations.orbax import CheckpointHandler, SaveArgs

    manager = ocp.CheckpointManager(DIRECTORY, item_handlers=CheckpointHandler())
    state = {"w": halves(np.ones((8, 2), np.float32))}
    manager.save(1, args=SaveArgs(state))
    manager.wait_until_finished()
    texts = []
    for culprit in (0, COUNT - 1):
        bad = {"w": object()} if culprit == RANK else state
        with raising(errors.CheckpointError) as told:
            manager.save(2, args=SaveArgs(bad))
        texts.append(told)
    assert manager.all_steps() == [1]

    real = checkpoint_save_distributed._write_part

    def fail(*args):
        raise OSError("no space")

    checkpoint_save_distributed._write_part = fail
    manager.save(2, args=SaveArgs(state))
    with raising(errors.SaveFailedError) as told:
        manager.wait_until_finished()
    texts.append(told)
    checkpoint_save_distributed._write_part = real
    manager.save(3, args=SaveArgs(state))
    manager.wait_until_finished()
    assert 3 in manager.all_steps()
    states.check_array(manager.restore(3)["w"], np.ones((8, 2), np.float32))
    say(told=texts)


# ---- what goes wrong ---------------------------------------------------------------


def faults():
    """One process fails, each in turn: all are told, and the next save is good."""
    for layout in ("chunks", "default"):
        for culprit in (0, COUNT - 1):
            _fail_to_write(layout, culprit)
    with flaxckpt.Checkpointer(DIRECTORY / "chunks") as ckpt:
        _fail_to_give_state(ckpt)
        with raising(errors.CheckpointExistsError):
            ckpt.save(2, {"w": jnp.ones(2)})
        handle = ckpt.save(2, {"w": jnp.ones(2)}, on_exists="skip")
        assert handle.wait().skipped
        _find_damage(ckpt)
        told = _ask_for_another(ckpt)
    with flaxckpt.Checkpointer(DIRECTORY / "empty") as ckpt:
        assert not ckpt._session.has_steps()
        with raising(errors.CheckpointNotFoundError):
            ckpt.restore()
    say(told=told)


def cancelled():
    """One process cancels, or all do: the save ends for all, and the next is good."""
    for layout in ("chunks", "default"):
        with flaxckpt.Checkpointer(DIRECTORY / layout, layout=LAYOUTS[layout]) as ckpt:
            for step, culprits in enumerate([{COUNT - 1}, {0}, set(range(COUNT))]):
                _cancel(ckpt, step, culprits)
            handle = ckpt.save(9, states.everything(9, "columns"))
            handle.wait()
            assert not handle.cancel()
            steps = ckpt.steps()
    say(steps=steps)


def _cancel(ckpt, step, culprits):
    """Cancels a save while each of the culprits is still to write."""
    write, handle = checkpoint_commit.write_arrays, None

    def hold(*args):
        while handle is None or not handle.is_awaited():
            time.sleep(0.001)
        write(*args)

    if RANK in culprits:
        checkpoint_commit.write_arrays = hold
    try:
        handle = ckpt.save(step, states.everything(step, "columns"))
        assert RANK not in culprits or handle.cancel()
        with raising(errors.SaveCancelledError):
            handle.wait()
    finally:
        checkpoint_commit.write_arrays = write
    assert ckpt.steps() == []
    left = [p.name for p in ckpt.directory.iterdir() if "tmp-writing" in p.name]
    assert RANK or not left, "process 0 has removed it, when it is told"


def refused():
    """What no reader would take is refused in each process, at the call."""
    held = [jnp.ones(2)]
    held.append(held)
    told = []
    with flaxckpt.Checkpointer(DIRECTORY) as ckpt:
        for state, metadata in (
            ({"a": np.zeros((1,) * 33)}, {}),
            ({"a": held}, {}),
            ({"a": "," * (9 * 2**20)}, {}),
            ({"a": jnp.ones(2)}, {"key": object()}),
        ):
            try:
                ckpt.save(1, state, metadata=metadata)
            except errors.CheckpointError as error:
                told.append(type(error).__name__)
        ckpt.save(1, {"a": jnp.ones(2)}).wait()
        steps = ckpt.steps()
    say(told=told, steps=steps)


def _fail_to_write(layout, culprit):
    directory = DIRECTORY / layout
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with flaxckpt.Checkpointer(directory, layout=LAYOUTS[layout]) as ckpt:
        step = 1 + max(ckpt.steps(), default=0)
        handle = None
        if culprit == RANK:
            resource.setrlimit(resource.RLIMIT_FSIZE, (16384, limits[1]))
        try:
            with raising(errors.SaveFailedError) as told:
                handle = ckpt.save(step, states.everything(step, "columns"))
                handle.wait()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert handle is not None, "it is told by wait"
        assert f"process {culprit}: " in told[1], told
        assert step not in ckpt.steps()
        left = [p.name for p in directory.iterdir() if f"{step}." in p.name]
        assert RANK or not left, "process 0 has removed it, when it is told"
        ckpt.save(step, states.everything(step, "columns")).wait()
        states.check(ckpt.restore(states.abstract("rows")), step, "rows")


class Broken:
    def __init__(self, is_broken):
        self.is_broken = is_broken

    def __next__(self):
        return 0

    def __iter__(self):
        return self

    def get_state(self):
        if self.is_broken:
            raise RuntimeError("no state today")
        return {"position": 1}

    def set_state(self, state):
        pass


def _fail_to_give_state(ckpt):
    iterator = Broken(RANK == COUNT - 1)
    if iterator.is_broken:
        with raising(errors.DatasetStateError):
            ckpt.save(50, {"w": jnp.ones(2)}, dataset=iterator)
        return
    with raising(errors.SaveFailedError) as told:
        ckpt.save(50, {"w": jnp.ones(2)}, dataset=iterator).wait()
    assert f"process {COUNT - 1}: " in told[1]
    assert "no state today" in told[1]


def _find_damage(ckpt):
    """A chunk that only one process reads is damaged: all take the older step."""
    older, newest = ckpt.steps()[-2:]
    state = states.abstract("rows")
    if RANK == 0:
        root = ckpt.directory / str(newest) / "state"
        names = chunks.names(root, "arrays.large")
        last = max(names, key=lambda name: [int(n) for n in name.split(".")[2:]])
        chunks.flip(root, last, at=100)
    wanted = {"arrays": {"large": halves(states.values(0)["large"])}}
    found, step = ckpt.restore_latest(wanted)
    assert step == older
    states.check_array(found["arrays"]["large"], states.values(older)["large"])
    states.check(ckpt.restore(state), older, "rows")
    if RANK == 0:
        assert list(ckpt.damaged()) == [newest]


def _ask_for_another(ckpt):
    """One process asks for what is not there."""
    wanted = {"nowhere" if RANK == 1 else "numpy": np.zeros((2, 3), int)}
    with raising(errors.CheckpointError) as told:
        ckpt.restore(wanted)
    assert (told[0] == "RestoreMismatchError") == (RANK == 1)
    assert "nowhere" in told[1]
    return told[1]


def disagree():
    """What is not the same everywhere is committed nowhere."""
    same = halves(np.ones((8, 2), np.float32))
    told = []

    def differs(ckpt, step, state, kind=errors.SaveFailedError):
        with raising(kind) as found:
            ckpt.save(step, state).wait()
        told.append(found[1])
        assert ckpt.steps() == [1]

    with flaxckpt.Checkpointer(DIRECTORY) as ckpt:
        ckpt.save(1, {"w": same}).wait()
        differs(ckpt, 10 + RANK, {"w": same})
        differs(ckpt, 2, {f"w{RANK}": same})
        differs(ckpt, 3, {"w": same, "n": np.zeros(2 + RANK)})
        differs(ckpt, 4, {"w": same, "n": np.zeros(2) if RANK else jnp.zeros(3)})
        differs(ckpt, 5, {"w": same} if RANK else {"w": same, "only_here": 1})
        differs(ckpt, 6, {"w": halves(np.ones((8, 2), np.float32), step=1 - 2 * RANK)})
        in_order = ["w", "n"] if RANK else ["n", "w"]  # jax sorts the keys of a dict
        ckpt.save(3, {key: {"w": same, "n": np.zeros(2)}[key] for key in in_order})
        ckpt.delete(3)
        ckpt.save(2, {"w": same}).wait()
        assert ckpt.steps() == [1, 2]
        item = ("state", "model")[RANK]
        with flaxckpt.Checkpointer(DIRECTORY / "of_items", items=item) as other:
            with raising(errors.SaveFailedError) as found:
                other.save(1, {"w": same}).wait()
            told.append(found[1])
        notes = Path(DIRECTORY) / "2" / "notes.txt"
        if RANK == 0:
            notes.write_text("mine")
        with raising(errors.CheckpointError) as found:
            ckpt.save(2, {"w": same}, on_exists="overwrite").wait()
        assert "notes.txt" in found[1]
        if RANK == 0:
            assert notes.read_text() == "mine"
            notes.unlink()
        ckpt.save(2, {"w": same}, on_exists="overwrite").wait()
        with raising(errors.OptionError):
            ckpt.restore({"w": same}, step=2 - RANK)
        ckpt.restore({"w": same}, step=1)
    with raising(errors.OptionError):
        flaxckpt.Checkpointer("memory://nowhere/run").save(1, {"w": same})
    say(told=told)


def late():
    """The last process does not save: the others are told who is missing, and where."""
    with flaxckpt.Checkpointer(DIRECTORY) as ckpt:
        ckpt.save(1, {"w": halves(np.ones((8, 2)))}).wait()
    # On a busy machine, the others are late, too.
    with flaxckpt.Checkpointer(DIRECTORY, peer_timeout_secs=10) as ckpt:
        if RANK == COUNT - 1:
            wait_for(DIRECTORY / "told")
            say(told=None)
            return
        with raising(errors.SaveFailedError) as told:
            ckpt.save(2, {"w": halves(np.ones((8, 2)))}).wait()
        assert ckpt.steps() == [1]
        say(told=told[1])
        if RANK == 0:
            (DIRECTORY / "told").touch()


def wait_for(path):
    deadline = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < deadline, f"no {path}"
        time.sleep(0.005)


def live():
    """Restores, and then saves step after step, until it is killed."""
    try:
        with flaxckpt.Checkpointer(DIRECTORY, keep=[LatestN(3)]) as ckpt:
            step = 0
            if ckpt.latest_step() is not None:
                state, step = ckpt.restore_latest(small(0))
                check_small(state, step)
            say(restored=step)
            while True:
                step += 1
                handle = ckpt.save(step, small(step))
                handle.wait()
                say(saved=step)
    except errors.CheckpointError as error:
        say(told=str(error))
        os._exit(3)  # jax would wait for the dead


def small(seed):
    value = np.arange(4096, dtype=np.float32).reshape(64, 64) + seed
    return {"a": halves(value), "b": halves(value[::-1]), "n": seed}


def check_small(state, step):
    value = np.arange(4096, dtype=np.float32).reshape(64, 64) + step
    states.check_array(state["a"], value)
    states.check_array(state["b"], value[::-1])
    assert state["n"] == step


def lost():
    """The last process is killed before it does anything with others."""
    with flaxckpt.Checkpointer(DIRECTORY) as ckpt:
        distributed_operation.find_group(DIRECTORY).store.get(
            f"{distributed_heartbeat._KEY}/{RANK}", 20
        )
        say(opened=True)
        if RANK == COUNT - 1:
            wait_for(DIRECTORY / "never")
        wait_for(DIRECTORY / "killed")
        with raising(errors.SaveFailedError) as told:
            ckpt.save(1, {"w": np.ones(4)}).wait()
        say(told=told[1])
        os._exit(3)  # jax would wait for the dead


def race():
    """Two jobs save the same steps: the first one counts."""
    won = []
    with flaxckpt.Checkpointer(DIRECTORY) as ckpt:
        for step in range(1, GIVEN["steps"] + 1):
            if RANK == 0:
                (DIRECTORY / f"{GIVEN['job']}-at-{step}").touch()
            for job in ("one", "other"):
                wait_for(DIRECTORY / f"{job}-at-{step}")
            try:
                ckpt.save(step, small(1000 * len(GIVEN["job"]))).wait()
                won.append(step)
            except errors.CheckpointExistsError:
                pass
    say(won=won)


def parts():
    """Each process has a staging directory of its own."""
    from tests.distributed import parts_together

    say(**parts_together.run(Path(where), RANK, GIVEN))


def together():
    """What processes tell each other, whichever way it goes."""
    from tests.distributed import exercise_together

    DIRECTORY.mkdir(parents=True, exist_ok=True)
    group = distributed_operation.find_group(DIRECTORY)
    is_files = type(group.store) is distributed_key_value.FileStore
    assert is_files == GIVEN["files"]
    exercise_together.exercise(group)
    say(ok=True)


if __name__ == "__main__":
    try:
        for scenario in names.split(","):
            DIRECTORY = Path(where) / scenario
            globals()[scenario]()
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # or it would wait for the others, and they for it
