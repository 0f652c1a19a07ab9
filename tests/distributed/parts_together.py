"""What processes with directories of their own do, one after the other."""

import contextlib
import dataclasses
import os
import shutil
import signal
import threading
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P

import flaxckpt
from flaxckpt import errors, policies
from tests.distributed import states
from tests.faults.shim import Shim


def run(directory, rank, given):
    """Does the steps of `given["do"]`; returns what they found, by their names."""
    events, found = [], {}
    staging = given.get("staging", "local-{process}")
    names = given.get("directories")  # of the directories, by process
    if names is not None:
        staging = names[rank]
    tier = {}
    if staging is not None:
        keep = [policies.LatestN(given.get("keep", 1))]
        tier = {"staging": f"{directory}/{staging}", "keep_staging": keep}
    try:
        ckpt = flaxckpt.Checkpointer(
            given.get("url", directory / "run"),
            **tier,
            staging_copies=given.get("copies_of", {}).get(
                str(rank), given.get("copies", 0)
            ),
            peer_network=given.get("network"),
            peer_certificate=given.get("certificates", {}).get(
                str(rank), given.get("certificate")
            ),
            failure_domain=lambda index: given.get("domains", "abcdefgh")[index],
            peer_timeout_secs=given.get("timeout_secs", 60),
            sinks=[events.append],
            layout=flaxckpt.ArrayLayout(zarr_version=given.get("zarr_version", 3)),
        )
    except errors.OptionError as error:
        return {"refused": str(error)}
    for row in given["do"]:
        name, *args = row
        value = DO[name](ckpt, rank, given, *args)
        if value is not None:
            found[name] = value
    if given.get("closes", True):
        ckpt.close()
    found["events"] = [event.kind for event in events]
    details = [event.details for event in events if event.kind == "restored"]
    if details:
        found["from_peers"] = details[-1]["from_peers"]
        found["from_directory"] = details[-1]["from_directory"]
        found["missing"] = details[-1].get("missing", [])
    return found


def save_with_copies(ckpt, rank, given, step):
    result = ckpt.save(step, states.everything(step, "rows")).wait()
    ckpt.wait_for_copies()
    return result.copies


def copy_at_low_priority(ckpt, rank, given, step):
    """Saves; returns whether threads of the copies have lowered their priority."""
    path = ckpt.directory.parent / f"local-{rank}/{step}"
    real, lowered = os.nice, []

    def nice(value):
        if path.exists():  # threads of the save have lowered theirs before
            lowered.append(value)
        return real(value)

    os.nice = nice
    ckpt.save(step, states.everything(step, "rows")).wait()
    while not list(path.glob("COPIES.*")):
        time.sleep(0.01)
    return bool(lowered)


def save(ckpt, rank, given, step, mesh="rows", **options):
    state = states.everything(step, mesh)
    options.setdefault("metrics", {"loss": 1 / (step + 1)})
    return ckpt.save(step, state, **options).wait().tier


def planned_state():
    """Leaves with files of their own, and small ones that share files."""
    mesh = jax.make_mesh((jax.device_count(),), ("x",))

    def leaf(shape, *spec, dtype=np.float32):
        value = np.arange(np.prod(shape)).reshape(shape).astype(dtype)
        return states.array(value, NamedSharding(mesh, P(*spec)))

    return {
        "replicated": leaf((2048, 1024)),
        "split": leaf((2048, 1024), "x"),
        "small": [leaf((64 + 8 * n, 128), "x") for n in range(20)],
        "same": [leaf((64 + n, 128)) for n in range(20)],
        # TensorStore encodes these.
        "encoded": [
            leaf((512, 512 + n), *spec, dtype=jnp.int4)
            for n in range(4)
            for spec in [("x",), ()]
        ],
    }


def save_planned(ckpt, rank, given):
    """Saves a state, and returns what a simulation says of its local tier."""
    state = planned_state()
    mesh = AbstractMesh((jax.device_count(),), ("x",))
    abstract = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(
            x.shape, x.dtype, sharding=NamedSharding(mesh, x.sharding.spec)
        ),
        state,
    )
    ckpt.save(1, state).wait()
    ckpt.wait_for_copies()
    copies, count = given["copies"], jax.process_count()
    planned = flaxckpt.simulate(abstract, processes=count, staging_copies=copies)
    return dataclasses.asdict(planned)


def save_partly_changed(ckpt, rank, given, first, last):
    """Saves a state of which a leaf changes from step to step."""
    state = planned_state()
    for step in range(first, last + 1):
        changed = jax.tree.map(lambda leaf, n=step: leaf + n, state["small"])
        ckpt.save(step, state | {"small": changed}).wait()
        ckpt.wait_for_copies()
        ckpt.wait_for_uploads()


def restore_planned(ckpt, rank, given):
    for leaf in jax.tree.leaves(ckpt.restore(planned_state())):
        value = np.arange(leaf.size).reshape(leaf.shape).astype(leaf.dtype)
        states.check_array(leaf, value)


def skip(ckpt, rank, given, step):
    state = states.everything(step + 100, "rows")
    return ckpt.save(step, state, on_exists="skip").wait().skipped


def save_other(ckpt, rank, given, step):
    """Another state of the same step."""
    state = states.everything(step + 100, "rows")
    return ckpt.save(step, state, overwrite=True).wait().tier


def restore(ckpt, rank, given, mesh="rows", more=0):
    state, step = ckpt.restore_latest(states.abstract(mesh))
    states.check(state, step + more, mesh)
    return step


def synced_by_restore(ckpt, rank, given):
    """Restores; returns the files of arrays of others that were synced after it."""
    real, synced = os.fsync, []

    def fsync(descriptor):
        synced.append(str(Path(f"/proc/self/fd/{descriptor}").readlink()))
        real(descriptor)

    os.fsync = fsync
    restore(ckpt, rank, given, "columns")
    for thread in threading.enumerate():
        if thread.name == "flaxckpt copies":
            thread.join()
    own = f"/d/{rank}."
    return [f for f in synced if "state/d/" in f and own not in f and Path(f).is_file()]


def restore_or_init(ckpt, rank, given):
    on_step = flaxckpt.CheckpointCallback(ckpt, every_steps=1)
    state, step = on_step.restore_or_init(states.everything(0, "rows"))
    states.check(state, step, "rows")
    return step


def failing_restore(ckpt, rank, given, mesh="rows"):
    try:
        ckpt.restore(states.abstract(mesh))
    except errors.CheckpointError as error:
        return [type(error).__name__, str(error)]
    raise AssertionError("nothing was raised")


def failing_save(ckpt, rank, given, step):
    try:
        save(ckpt, rank, given, step)
    except errors.CheckpointError as error:
        return [type(error).__name__, str(error)]
    raise AssertionError("nothing was raised")


def wait_for_copies(ckpt, rank, given):
    ckpt.wait_for_copies()


def wait_for_uploads(ckpt, rank, given):
    ckpt.wait_for_uploads()


def fail_to_wait(ckpt, rank, given, patience):
    """Returns the error of a wait for uploads of so many seconds, by process."""
    try:
        ckpt.wait_for_uploads(patience[rank])
    except errors.CheckpointError as error:
        return [type(error).__name__, str(error)]
    raise AssertionError("nothing was raised")


def lose_directory(ckpt, rank, given, loser):
    if rank == loser:
        shutil.rmtree(ckpt.directory.parent / f"local-{rank}")


def kill(ckpt, rank, given):
    os.kill(os.getpid(), signal.SIGKILL)


def pause(ckpt, rank, given, secs):
    time.sleep(secs)


def delete(ckpt, rank, given, step):
    ckpt.delete(step)


def save_note(ckpt, rank, given, step):
    ckpt.save(step, states.everything(step, "rows"), json={"note": [step]}).wait()


def delete_item(ckpt, rank, given, step, item):
    ckpt.delete(step, item=item)


def restore_step(ckpt, rank, given, step):
    states.check(ckpt.restore(states.abstract("rows"), step=step), step, "rows")


def pin(ckpt, rank, given, step):
    ckpt.pin(step)


def pin_late(ckpt, rank, given, step):
    """Pins, in the other processes when process 0 has uploaded its pin."""
    pinned = ckpt.directory / f"{step}/PINNED"
    pending = ckpt.directory.parent / f"local-0/{step}/NOT_UPLOADED"
    deadline = time.monotonic() + 60
    while rank and (pending.exists() or not pinned.exists()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    ckpt.pin(step)


def pin_until_upload_fails(ckpt, rank, given, step):
    """While the other processes end, process 0 pins; returns why no upload follows."""
    failed = []
    ckpt.events.subscribe(lambda e: e.kind == "failed" and failed.append(e.details))
    while rank == 0 and not failed:
        ckpt.pin(step)
        for thread in threading.enumerate():
            if thread.name == "flaxckpt uploads":
                thread.join()
        ckpt.events.deliver()
    return failed


def verify(ckpt, rank, given, step):
    return ckpt.verify(step).ok


def prune(ckpt, rank, given):
    ckpt.prune()


def explain(ckpt, rank, given):
    return {str(step): why for step, why in ckpt.explain().items()}


def steps(ckpt, rank, given):
    return ckpt.steps()


def fail_in_saves(ckpt, rank, given, faults):
    """Saves a step with each fault; returns how it ended, and the step that is left."""
    ended = []
    for step, fault in enumerate(faults, start=1):
        with failing(ckpt, rank, fault):
            try:
                tier = ckpt.save(step, states.everything(step, "rows")).wait().tier
                ckpt.wait_for_copies(60)
            except errors.CheckpointError as error:
                tier = str(error)
        state, found = ckpt.restore_latest(states.abstract("rows"))
        states.check(state, found, "rows")
        ended.append([step, found, tier])
    return ended


def fail_in_restores(ckpt, rank, given, faults):
    """Restores a step with each fault, and then without; returns what it found."""
    ended = []
    for fault in faults:
        with failing(ckpt, rank, fault):
            try:
                state, found = ckpt.restore_latest(states.abstract("columns"))
                states.check(state, found, "columns")
            except errors.CheckpointError as error:
                found = str(error)
        state, step = ckpt.restore_latest(states.abstract("rows"))
        states.check(state, step, "rows")
        ended.append([found, step])
    return ended


@contextlib.contextmanager
def failing(ckpt, rank, fault):
    """Has calls fail below the staging directory of a process."""
    options, armed = dict(fault), Shim()
    if rank != options.pop("process"):
        yield
        return
    armed.arm(ckpt.directory.parent / f"local-{rank}", **options)
    try:
        yield
    finally:
        armed.disarm()


DO = {
    function.__name__: function
    for function in (
        save,
        skip,
        save_other,
        save_planned,
        save_partly_changed,
        restore_planned,
        save_with_copies,
        copy_at_low_priority,
        restore,
        synced_by_restore,
        restore_or_init,
        failing_restore,
        failing_save,
        fail_in_saves,
        fail_in_restores,
        wait_for_copies,
        wait_for_uploads,
        lose_directory,
        fail_to_wait,
        kill,
        pause,
        delete,
        delete_item,
        save_note,
        restore_step,
        pin,
        pin_late,
        pin_until_upload_fails,
        verify,
        explain,
        prune,
        steps,
    )
}
