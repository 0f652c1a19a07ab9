"""What two processes save and restore together; see `program` for what each does."""

import base64
import json
import stat

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from orbax import checkpoint as ocp

import flaxckpt
from tests.distributed import jobs, states
from tests.helpers import old_stores

pytestmark = pytest.mark.multiprocess

LAYOUTS = ["chunks", "default", "zstd", "compact"]


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """The directory of a job of two, and what they said."""
    directory = tmp_path_factory.mktemp("two")
    names = "save,train,loading,data,sizes,share,together,items"
    given = {"layouts": LAYOUTS, "files": False, "permissions": 0o750}
    return directory, jobs.run(names, 2, directory, **given)


@pytest.fixture(scope="module")
def with_orbax(tmp_path_factory):
    directory = tmp_path_factory.mktemp("orbax")
    return directory, jobs.run(
        "orbax,faults,cancelled,refused,disagree,late",
        2,
        directory,
        layouts=LAYOUTS[::3],
    )


@pytest.fixture(scope="module")
def by_managers(tmp_path_factory):
    """The directory of a job whose processes save through Orbax's managers."""
    directory = tmp_path_factory.mktemp("managers")
    return directory, jobs.run("handler", 2, directory, layouts=LAYOUTS[::3])


@pytest.mark.slow
def test_every_leaf_restores_on_other_meshes_in_every_layout(job):
    _, said = job
    first, second = said["save"]
    assert first == second, "all know what all have written"
    assert len(first["bytes"]) == 2 * len(LAYOUTS)


def test_files_of_both_processes_have_requested_mode(job):
    below = (job[0] / "save").glob("*/**/*")
    modes = {(path.is_dir(), stat.S_IMODE(path.stat().st_mode)) for path in below}
    assert modes == {(True, 0o750), (False, 0o640)}


@pytest.mark.slow
def test_device_snapshots_need_no_common_order(tmp_path):
    said = jobs.run(
        "save,train", 2, tmp_path, layouts=["chunks", "compact"], snapshot="device"
    )
    assert said["save"][0] == said["save"][1]
    assert said["train"] == ({"steps": [1, 2, 3]},) * 2


def test_training_continues_while_other_process_is_writing(job):
    assert job[1]["train"] == ({"steps": [1, 2, 3]},) * 2


@pytest.mark.parametrize("layout", LAYOUTS)
def test_processes_save_steps_of_several_items_together(job, layout):
    directory, said = job
    assert said["items"] == ({"ok": True},) * 2
    path = directory / "items" / layout
    for step in (1, 2):
        report = flaxckpt.verify(path, step=step)
        assert report.ok, report
        assert not report.extra
        assert not report.unchecked
    found = flaxckpt.load(path / "2")
    check_whole({"arrays": found["arrays"], **found["rest"]}, 2)
    assert list(flaxckpt.load(path / "1")) == ["arrays"]


def test_processes_compute_during_load(job):
    assert job[1]["loading"] == ({"ok": True},) * 2


@pytest.mark.slow
def test_each_process_rejects_unsupported_leaves_and_names(with_orbax):
    told = ["UnsupportedLeafError", "LeafNameError", "UnsupportedLeafError"]
    wanted = {"told": [*told, "OptionError"], "steps": [1]}
    assert with_orbax[1]["refused"] == (wanted, wanted)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_process_verifies_and_loads_two_process_checkpoints(job, layout):
    path = job[0] / "save" / layout / "2"
    report = flaxckpt.verify(path)
    assert report.ok, report
    assert not report.unchecked
    assert not report.extra
    check_whole(flaxckpt.load(path), 2)


def check_whole(found, seed):
    plain = dict(states.values(seed))
    edge = plain.pop("edge")
    np.testing.assert_array_equal(found["edge"], edge)
    for leaf, value in plain.items():
        assert np.asarray(found["arrays"][leaf]).tobytes() == value.tobytes(), leaf
    np.testing.assert_array_equal(found["local"], np.arange(4.0) + seed)
    assert found["numbers"] == (seed, 0.5, True, None)
    assert found["text"] == states.TEXT


@pytest.mark.parametrize("layout", LAYOUTS)
def test_detects_damaged_value_in_part_of_each_process(job, layout):
    path = job[0] / "save" / layout / "2" / "state"
    parts = [*path.glob("d/[01].small.*"), *path.glob("d/[01].*/arrays.large")]
    assert {part.relative_to(path / "d").parts[0][0] for part in parts} == {"0", "1"}
    assert any(part.name == "arrays.large" for part in parts)
    for part in parts:
        content = part.read_bytes()
        middle = len(content) // 2
        flipped = bytes([content[middle] ^ 1])
        part.write_bytes(content[:middle] + flipped + content[middle + 1 :])
        assert not flaxckpt.verify(path.parent).ok, part
        part.write_bytes(content)
    assert flaxckpt.verify(path.parent).ok


@pytest.mark.parametrize("layout", LAYOUTS)
def test_single_process_stock_orbax_reads_whole_checkpoint(job, layout):
    mesh = Mesh(np.array(jax.devices()[:4]), ("x",))
    step = job[0] / "save" / layout / "2"
    values = states.values(2)
    wanted = jax.eval_shape(lambda: flaxckpt.load(step)["arrays"]["rows"])
    with ocp.CheckpointManager(step.parent) as manager:
        assert manager.all_steps() == [1, 2]
        assert manager.metrics(2) == {"loss": 0.5}
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
        target = {"arrays": {"rows": wanted}}
        found = reader.restore(
            step / "state",
            args=ocp.args.PyTreeRestore(
                target,
                restore_args={
                    "arrays": {
                        "rows": ocp.ArrayRestoreArgs(
                            sharding=NamedSharding(mesh, P("x"))
                        )
                    }
                },
                partial_restore=True,
            ),
        )
    np.testing.assert_array_equal(found["arrays"]["rows"], values["rows"])


def test_processes_share_reads_and_writes_of_replicated_arrays(job):
    for said in job[1]["share"]:
        assert said["balance"] <= 1.1
        every, once = said["shares"]
        assert 1 <= every < 1.2
        assert 0.5 <= once < 0.7


@pytest.mark.slow
def test_disagreement_between_processes_prevents_commit(with_orbax):
    first, second = (said["told"] for said in with_orbax[1]["disagree"])
    assert "step 11" in second[0]
    assert "step 10" in second[0]
    assert "w1: wanted nothing, found float32[8, 2]" in second[1]
    assert "w0: wanted float32[8, 2]" in second[1]
    assert "only_here: wanted scalar int64" in second[4]
    assert "on devices 0, 1, " in second[5]
    assert "found ('x',) over" in second[5]
    assert "w: wanted stored as state/w, found stored as model/w" in second[6]
    assert all("process 1" in text for text in first + second)


def test_each_process_has_own_part_of_data(job):
    directory, said = job
    first, second = said["data"]
    assert not set(first["next"]) & set(second["next"])
    files = sorted(p.name for p in (directory / "data/mine/1/dataset").iterdir())
    assert files == ["metadata", "process_0-of-2.json", "process_1-of-2.json"]
    manifest = json.loads((directory / "data/mine/1/flaxckpt.json").read_text())
    assert {f"dataset/{name}" for name in files} <= manifest["digests"].keys()


def test_dataset_of_first_process_only_is_no_damage(job):
    told = [said["told"] for said in job[1]["data"]]
    assert all("first/2" in text and "passed no dataset" in text for text in told)


def test_only_elastic_data_continues_in_one_process(job):
    directory, _ = job
    data = flaxckpt.datasets.StepIndexed(lambda i: 10 * i)
    with flaxckpt.Checkpointer(directory / "data/common", read_only=True) as ckpt:
        ckpt.restore_dataset(data)
    assert next(data) == 50
    with (
        flaxckpt.Checkpointer(directory / "data/mine", read_only=True) as ckpt,
        pytest.raises(flaxckpt.errors.DatasetStateError, match="of 2 processes"),
    ):
        ckpt.restore_dataset(iter(Parts()))


class Parts:
    def __iter__(self):
        return self

    def __next__(self):
        return 0

    def get_state(self):
        return {"next_index": 0}

    def set_state(self, state):
        raise AssertionError("another process's state")


def test_each_process_reads_only_its_share(job):
    for said in job[1]["sizes"]:
        assert said["share"] < 0.6
        assert said["parts"] < 0.6  # of each chunk a half, verified
    manifest = json.loads((job[0] / "sizes" / "columns" / "flaxckpt.json").read_text())
    [checksums] = manifest["segments"]["crc32c"].values()
    assert len(base64.b64decode(checksums)) == 4 * 63 * 4  # of all processes' chunks


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 4])
def test_other_process_counts_restore_checkpoint(job, count, tmp_path):
    """Two to one, two to four: on meshes of theirs."""
    (tmp_path / "restore").symlink_to(job[0] / "save")
    given = {"layouts": ["chunks", "compact"], "meshes": ["columns", "mixed"]}
    assert jobs.run("restore", count, tmp_path, **given)["restore"]


@pytest.mark.slow
@pytest.mark.parametrize("is_old", [False, True])
def test_two_processes_restore_single_process_checkpoints(tmp_path, is_old):
    layouts = ["chunks", "compact"]
    jobs.run("save", 1, tmp_path, layouts=layouts)
    for step in (tmp_path / "save").glob("*/[12]") if is_old else ():
        old_stores.make_directories(step)
    (tmp_path / "restore").symlink_to(tmp_path / "save")
    assert jobs.run("restore", 2, tmp_path, layouts=layouts, meshes=["mixed"])


@pytest.mark.slow
def test_orbax_and_flaxckpt_read_each_other(with_orbax):
    directory, said = with_orbax
    assert said["orbax"] == ({"ok": True},) * 2
    found = flaxckpt.load(directory / "orbax/theirs")
    for leaf in ("rows", "columns", "large"):
        wanted = states.values(3)[leaf]
        assert np.asarray(found["arrays"][leaf]).tobytes() == wanted.tobytes()


@pytest.mark.slow
def test_orbax_managers_save_flaxckpt_items(by_managers):
    directory, said = by_managers
    assert said["handler"] == ({"ok": True},) * 2
    for layout in LAYOUTS[::3]:
        for is_async in (True, False):
            item = directory / "handler" / f"{layout}_{is_async}" / "3" / "state"
            report = flaxckpt.verify(item)
            assert report.ok, report
            assert not report.extra
            check_whole(flaxckpt.load(item), 3)
            check_whole(flaxckpt.load(item.parent)["state"], 3)


@pytest.mark.slow
def test_one_failing_manager_fails_all_but_not_next_save(tmp_path):
    said = jobs.run("handler_faults", 2, tmp_path)
    first, second = [dict(enumerate(f["told"])) for f in said["handler_faults"]]
    assert first[0][0] == second[1][0] == "UnsupportedLeafError"
    assert second[0][0] == first[1][0] == "SaveFailedError"
    assert "process 0: 1 leaf cannot be saved" in second[0][1]
    assert "process 1: 1 leaf cannot be saved" in first[1][1]
    assert "process 1: no space" in first[2][1]
    names = {path.name for path in (tmp_path / "handler_faults").iterdir()}
    assert "2" not in names
    assert flaxckpt.verify(tmp_path / "handler_faults/3/default").ok


@pytest.mark.slow
def test_one_failing_process_fails_all_but_not_next_save(with_orbax):
    first, second = with_orbax[1]["faults"]
    assert "process 1: " in first["told"]
    assert "does not fit the state" in second["told"]


@pytest.mark.slow
def test_cancel_in_one_process_cancels_for_all(with_orbax):
    assert with_orbax[1]["cancelled"] == ({"steps": [9]},) * 2


@pytest.mark.slow
def test_late_process_is_named_and_prevents_commit(with_orbax):
    directory, said = with_orbax
    told = said["late"][0]["told"]
    assert "process 1: has not reached 'written' of step 2" in told
    assert not [p for p in (directory / "late").iterdir() if "tmp-writing" in p.name]


@pytest.mark.slow
def test_error_names_process_lost_before_first_save(tmp_path):
    with jobs.Job("lost", 2, tmp_path, silent_secs=6.0) as job:
        for process in job.processes:
            assert "opened" in process.stdout.readline()
        job.processes[1].kill()
        (tmp_path / "lost/killed").touch()
        (code, said, complaint), _ = job.ends()
    assert code == 3, complaint[-1500:]
    assert "process 1: has sent no heartbeat for " in jobs.rows(said)[-1]["told"]


@pytest.mark.slow
def test_file_store_replaces_coordination_service(tmp_path):
    names = "together,save,late"
    said = jobs.run(names, 2, tmp_path, layouts=["chunks", "default"], files=True)
    assert said["together"] == ({"ok": True},) * 2
    assert "process 1: has not reached 'written'" in said["late"][0]["told"]
    for layout in ("chunks", "default"):
        check_whole(flaxckpt.load(tmp_path / "save" / layout), 2)


@pytest.mark.slow
def test_processes_hear_each_other_over_a_slow_network(tmp_path):
    """Each message takes longer than a local look at a text."""
    jobs.run("together", 3, tmp_path, files=False, delay_secs=0.01)


@pytest.mark.slow
def test_one_of_two_competing_jobs_wins_each_step(tmp_path):
    steps = 6
    (tmp_path / "race").mkdir()
    with (
        jobs.Job("race", 2, tmp_path, job="one", steps=steps) as one,
        jobs.Job("race", 2, tmp_path, job="other", steps=steps) as other,
    ):
        ends = [one.ends(), other.ends()]
    won = []
    for end in ends:
        assert [code for code, _, _ in end] == [0, 0], end
        mine, others = [jobs.rows(out)[0]["won"] for _, out, _ in end]
        assert mine == others, "both of a job know the same"
        won.append(mine)
    assert sorted(won[0] + won[1]) == list(range(1, steps + 1))
    for name, mine in zip(("one", "other"), won, strict=True):
        for step in mine:
            found = flaxckpt.load(tmp_path / "race", step=step)
            assert found["n"] == 1000 * len(name)
            assert np.asarray(found["a"])[0, 0] == found["n"]
