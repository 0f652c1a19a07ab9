"""Runs in which each process has a staging directory of its own."""

import json
import re
import shutil
import sys
from pathlib import Path

import pytest

import flaxckpt
from flaxckpt import errors
from tests.distributed import jobs, states
from tests.helpers import command_line

pytestmark = pytest.mark.multiprocess


def run(directory, *do, count=2, **given):
    """What each process has found in a job that does `do` and ends."""
    return jobs.run("parts", count, directory, do=do, **given)["parts"]


def killed(directory, *do, count=2, **given):
    """A job that does `do`, and is killed then."""
    given = {"do": [*do, ["kill"]], **given}
    with jobs.Job("parts", count, directory, **given) as job:
        for code, _, err in job.ends():
            # Without process 0, jax aborts the others.
            assert code in (-9, -6), err[-3000:]


def remove_steps(directory):
    for step in directory.iterdir():
        if step.is_dir():
            shutil.rmtree(step)


def flip(file):
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Step 2 of two processes, after step 1; the run directory has neither."""
    directory = tmp_path_factory.mktemp("parts")
    said = run(directory, ["save", 1], ["save", 2], ["verify", 2], ["steps"])
    assert all(each["save"] == "staging" and each["verify"] for each in said)
    assert all(each["steps"] == [1, 2] for each in said)
    assert flaxckpt.verify(directory / "run/2").ok
    assert flaxckpt.load(directory / "run")["text"] == states.TEXT
    assert not (directory / "run/2/PARTS").exists()
    remove_steps(directory / "run")
    for index in range(2):  # deleted already, unless the job ended before
        shutil.rmtree(directory / f"local-{index}/1", ignore_errors=True)
    return directory


@pytest.fixture
def parts(saved, tmp_path):
    directory = tmp_path / "copy"
    shutil.copytree(saved, directory)
    for index in range(2):  # it names the run by its path
        owner = directory / f"local-{index}" / "STAGING_OF"
        owner.write_text(f"{directory / 'run'}\n")
    return directory


def test_each_process_keeps_its_part_and_metadata(saved):
    for index, other in ((0, 1), (1, 0)):
        step = saved / f"local-{index}/2"
        names = [str(p.relative_to(step)) for p in step.rglob("*") if p.is_file()]
        assert any(name.startswith(f"state/d/{index}.") for name in names)
        assert not any(name.startswith(f"state/d/{other}.") for name in names)
        assert flaxckpt.verify(step).ok
        why = "has parts of a step that 2 processes have saved"
        for read in (flaxckpt.load, lambda path: flaxckpt.convert(path, saved / "to")):
            with pytest.raises(errors.DamagedCheckpointError, match=why):
                read(step)
        assert why in command_line.run("show", step, "arrays/large", code=1)


@pytest.mark.parametrize(
    ("count", "mesh"),
    [
        (2, "rows"),
        pytest.param(2, "columns", marks=pytest.mark.slow),
        pytest.param(3, "replicated", marks=pytest.mark.slow),
        pytest.param(4, "rows", marks=pytest.mark.slow),
    ],
)
def test_any_process_count_restores_shared_parts(parts, count, mesh):
    said = run(parts, ["restore", mesh], count=count)
    assert all(each["restore"] == 2 for each in said)
    assert all(each["from_directory"] == 0 for each in said)
    assert sum(each["from_peers"] for each in said) > 0


@pytest.mark.slow
def test_process_keeps_copied_parts(parts):
    run(parts, ["restore", "columns"])
    shutil.copytree(parts / "run", parts / "uploaded")
    said = run(parts, ["restore", "columns"])
    assert all(each["from_peers"] == 0 for each in said)


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc/self/fd")
def test_syncs_copied_parts_after_restore(parts):
    for said in run(parts, ["synced_by_restore"]):
        files = map(Path, said["synced_by_restore"])
        assert said["from_peers"] == sum(file.stat().st_size for file in files) > 0


@pytest.mark.slow
def test_restores_after_swapping_directories(parts):
    said = run(parts, ["restore"], directories=["local-1", "local-0"])
    assert all(each["restore"] == 2 for each in said)


@pytest.mark.slow
def test_error_names_missing_part(parts):
    shutil.rmtree(parts / "local-1/2")
    told = [each["failing_restore"] for each in run(parts, ["failing_restore"])]
    for name, text in told:
        assert name == "CheckpointNotFoundError"
        assert "step 2, the parts of process 1 are at no process" in text


@pytest.mark.slow
def test_single_process_error_names_missing_parts(parts):
    ((name, text),) = [
        each["failing_restore"] for each in run(parts, ["failing_restore"], count=1)
    ]
    assert name == "CheckpointNotFoundError"
    assert "the parts of process 1" in text


@pytest.mark.slow
def test_saves_step_again_after_lost_part(parts):
    shutil.rmtree(parts / "local-1/2")
    said = run(parts, ["failing_restore"], ["save", 2], ["restore"])
    assert all(each["restore"] == 2 for each in said)


def test_repairs_damage_from_run_directory(parts):
    (parts / "local-1/2/NOT_UPLOADED").touch()
    (parts / "local-0/2/NOT_UPLOADED").touch()
    run(parts, ["wait_for_uploads"])
    assert flaxckpt.verify(parts / "run/2").ok
    for file in (parts / "local-1/2/state/d").glob("1.*"):
        flip(file if file.is_file() else next(file.iterdir()))
    said = run(parts, ["restore", "columns"])
    assert all(each["restore"] == 2 for each in said)
    assert all(each["from_directory"] > 0 for each in said)


def test_event_says_that_run_directory_was_read(tmp_path):
    run(tmp_path, ["save", 1], ["wait_for_uploads"])
    shutil.rmtree(tmp_path / "local-1")
    said = run(tmp_path, ["restore"])
    assert all(each["missing"] == [1] for each in said)
    assert said[1]["from_directory"] > 0
    for index in range(2):
        shutil.rmtree(tmp_path / f"local-{index}")
    said = run(tmp_path, ["restore"])
    assert all(each["from_directory"] > 0 for each in said)


@pytest.mark.skipif(sys.platform != "linux", reason="threads have no priority")
def test_copies_give_way_to_training(tmp_path):
    said = run(tmp_path, ["copy_at_low_priority", 1], copies=1)
    assert all(each["copy_at_low_priority"] for each in said)


@pytest.mark.slow
def test_damaged_part_is_uploaded_from_its_copy(tmp_path):
    do = [["save", 1], ["wait_for_copies"], ["wait_for_uploads"]]
    run(tmp_path, *do, copies=1)
    remove_steps(tmp_path / "run")
    for index in range(2):
        (tmp_path / f"local-{index}/1/NOT_UPLOADED").touch()
        for file in (tmp_path / f"local-{index}/1/state/d").glob(f"{index}.*"):
            flip(file if file.is_file() else next(file.iterdir()))
    run(tmp_path, ["wait_for_uploads"], copies=1)
    assert flaxckpt.verify(tmp_path / "run/1").ok


@pytest.mark.slow
def test_unrecoverable_damage_raises_error(parts):
    for file in (parts / "local-1/2/state/d").glob("1.*"):
        flip(file if file.is_file() else next(file.iterdir()))
    told = [each["failing_restore"] for each in run(parts, ["failing_restore"])]
    assert all(name == "DamagedCheckpointError" for name, _ in told)


@pytest.mark.slow
def test_error_names_places_and_faults_of_each_file(tmp_path):
    run(tmp_path, ["save", 1], ["wait_for_copies"], copies=1)
    remove_steps(tmp_path / "run")
    for index in range(2):
        for file in (tmp_path / f"local-{index}/1/state/d").glob("1.*"):
            flip(file if file.is_file() else next(file.iterdir()))
    for each in run(tmp_path, ["failing_restore"], copies=1):
        name, text = each["failing_restore"]
        assert name == "DamagedCheckpointError"
        assert re.search("d/1.*: process [01]: .* has changed since it", text)


def test_marks_unrecoverable_damage_on_all_processes(tmp_path):
    run(tmp_path, ["save", 1], ["save", 2], keep=2)
    remove_steps(tmp_path / "run")
    for file in (tmp_path / "local-1/2/state/d").glob("1.*"):
        flip(file if file.is_file() else next(file.iterdir()))
    said = run(tmp_path, ["restore"], ["steps"], keep=2)
    assert all(each["restore"] == 1 and each["steps"] == [1] for each in said)
    for index in range(2):
        reason = (tmp_path / f"local-{index}/2/DAMAGED").read_text()
        assert "process 1: " in reason
        assert "process 0: " not in reason
    said = run(tmp_path, ["save", 2], ["restore"], keep=2)
    assert all(each["restore"] == 2 for each in said)


@pytest.mark.parametrize(
    "name",
    [
        "_CHECKPOINT_METADATA",
        pytest.param("flaxckpt.json", marks=pytest.mark.slow),
        pytest.param("state/_METADATA", marks=pytest.mark.slow),
        pytest.param("state/manifest.ocdbt", marks=pytest.mark.slow),
        pytest.param("commit_success.txt", marks=pytest.mark.slow),
    ],
)
def test_repairs_metadata_from_another_process(parts, name):
    file = parts / "local-1/2" / name
    whole = file.read_bytes()
    if name == "commit_success.txt":
        file.unlink()
    else:
        file.write_bytes(whole[: len(whole) // 2])
    said = run(parts, ["restore"], ["explain"])
    assert all(each["restore"] == 2 and "2" in each["explain"] for each in said)
    assert file.read_bytes() == whole


def change_digit(file):
    """Changes the last digit, so that the file is of the same form as before."""
    content = bytearray(file.read_bytes())
    at = max(n for n, byte in enumerate(content) if byte in b"123456789")
    content[at] ^= 1 if content[at] not in b"1" else 2
    file.write_bytes(content)


@pytest.mark.parametrize(
    "name",
    [
        "commit_success.txt",
        "PARTS",
        pytest.param("flaxckpt.json", marks=pytest.mark.slow),
    ],
)
def test_mends_a_file_that_names_another_save_or_parts(parts, name):
    file = parts / "local-1/2" / name
    whole = file.read_bytes()
    change_digit(file)
    said = run(parts, ["restore"])
    assert all(each["restore"] == 2 for each in said)
    assert all(each["from_directory"] == 0 for each in said)
    if name != "PARTS":
        assert file.read_bytes() == whole
    else:
        assert json.loads(file.read_bytes())["files"] == json.loads(whole)["files"]


def test_error_names_the_process_with_a_damaged_identity(parts):
    for name in ("commit_success.txt", "flaxckpt.json"):
        change_digit(parts / "local-1/2" / name)
    for each in run(parts, ["failing_restore"]):
        kind, text = each["failing_restore"]
        assert kind == "DamagedCheckpointError"
        assert "process 1: commit_success.txt or flaxckpt.json is damaged" in text


def test_a_damaged_list_of_parts_is_mended_and_no_part_is_missing(parts):
    file = parts / "local-1/2/PARTS"
    files = json.loads(file.read_bytes())["files"]
    file.write_bytes(b'{"own": 1, "fi')
    said = run(parts, ["restore"])
    assert all(each["restore"] == 2 for each in said)
    assert all(each["from_directory"] == 0 for each in said)
    assert json.loads(file.read_bytes())["files"] == files


@pytest.mark.slow
def test_a_process_without_list_of_parts_has_all_of_them(tmp_path):
    run(tmp_path, ["save", 1], ["wait_for_copies"], count=4, copies=3)
    remove_steps(tmp_path / "run")
    file = tmp_path / "local-0/1/PARTS"
    files = json.loads(file.read_bytes())["files"]
    file.unlink()
    for name in (*files[0], *files[1], *files[2]):
        (tmp_path / "local-1/1" / name).unlink()
    for index in (2, 3):
        shutil.rmtree(tmp_path / f"local-{index}")
    for each in run(tmp_path, ["restore"], count=4, copies=3):
        assert each["restore"] == 1
        assert each["from_directory"] == 0
    assert json.loads(file.read_bytes())["files"] == files


@pytest.mark.slow
@pytest.mark.parametrize("names", [["PARTS"], ["flaxckpt.json", "PARTS"]])
def test_a_list_of_parts_that_is_damaged_everywhere_loses_the_step(parts, names):
    """The next save replaces it."""
    damaged, *gone = names
    for index in range(2):
        (parts / f"local-{index}/2" / damaged).write_bytes(b"{}")
        for name in gone:
            (parts / f"local-{index}/2" / name).unlink()
    said = run(parts, ["failing_restore"], ["save", 2], ["restore"])
    for kind, text in (each["failing_restore"] for each in said):
        assert kind == "DamagedCheckpointError"
        assert "its parts are unknown: PARTS or flaxckpt.json is damaged" in text
    assert all(each["restore"] == 2 for each in said)


def test_step_without_deleted_item_is_whole(tmp_path):
    do = [["save_note", 1], ["wait_for_copies"], ["delete_item", 1, "note"]]
    run(tmp_path, *do, copies=1)
    remove_steps(tmp_path / "run")
    shutil.rmtree(tmp_path / "local-1")
    said = run(tmp_path, ["restore"], ["wait_for_uploads"], copies=1)
    assert all(each["restore"] == 1 for each in said)
    assert said[1]["from_peers"] > 0
    assert not (tmp_path / "local-1/1/note").exists()
    assert flaxckpt.verify(tmp_path / "local-1/1").ok


@pytest.mark.slow
def test_save_keeps_a_whole_step_that_process_0_lacks(parts):
    names = ["local-2", "local-0", "local-1", "local-3"]
    do = [["failing_save", 2], ["save", 1], ["skip", 2], ["restore"]]
    for each in run(parts, *do, count=4, directories=names):
        assert each["skip"] == "step 2 exists"
        assert each["failing_save"][0] == "CheckpointExistsError"
        assert each["restore"] == 2


@pytest.mark.slow
def test_never_mixes_parts_of_two_saves(parts):
    shutil.copytree(parts / "local-1", parts / "old")
    run(parts, ["save_other", 2])
    remove_steps(parts / "run")
    shutil.rmtree(parts / "local-1")
    (parts / "old").rename(parts / "local-1")
    told = [each["failing_restore"] for each in run(parts, ["failing_restore"])]
    assert all(name == "CheckpointNotFoundError" for name, _ in told)


@pytest.mark.slow
def test_returning_machine_gets_current_step(parts):
    shutil.copytree(parts / "local-1", parts / "old")
    run(parts, ["save_other", 2])  # also in the run directory
    shutil.rmtree(parts / "local-1")
    (parts / "old").rename(parts / "local-1")
    said = run(parts, ["restore", "rows", 100])
    assert all(each["restore"] == 2 for each in said)
    assert said[1]["from_directory"] > 0


def test_lost_machine_needs_no_read_from_run_directory(tmp_path):
    certificate = jobs.make_certificate(tmp_path)
    given = {"copies": 1, "certificate": certificate, "network": "127.0.0.0/8"}
    do = [["save", 1], ["save", 2], ["wait_for_copies"]]
    killed(tmp_path, *do, count=4, **given)
    shutil.rmtree(tmp_path / "local-2")
    remove_steps(tmp_path / "run")
    do = [["restore", "replicated"], ["save", 3, "replicated"], ["wait_for_copies"]]
    left = [f"local-{index}" for index in (0, 1, 3)]
    said = run(tmp_path, *do, count=3, directories=left, **given)
    assert all(each["restore"] == 2 for each in said)
    assert all(each["from_directory"] == 0 for each in said)
    assert "copied" in said[0]["events"]
    assert flaxckpt.verify(tmp_path / "run/3").ok


def test_directory_lost_during_a_job_is_filled_again(tmp_path):
    do = [["save", 1], ["wait_for_copies"], ["wait_for_uploads"]]
    said = run(tmp_path, *do, ["lose_directory", 1], ["restore"], copies=1)
    said += run(tmp_path, ["restore"], copies=1)
    assert all(each["restore"] == 1 for each in said)
    assert all(each["from_directory"] == 0 for each in said)


def test_losing_disk_of_process_0_loses_no_step(tmp_path):
    do = [["save", 1], ["save", 2], ["save", 3], ["wait_for_copies"]]
    run(tmp_path, *do, copies=1, keep=3)
    remove_steps(tmp_path / "run")
    for step in (1, 2, 3):  # as if nothing had been uploaded
        (tmp_path / f"local-1/{step}/NOT_UPLOADED").write_text("{}")
    shutil.rmtree(tmp_path / "local-0")
    do = [["restore_or_init"], ["save", 4], ["wait_for_uploads"]]
    said = run(tmp_path, *do, copies=1, keep=3)
    assert all(each["restore_or_init"] == 3 for each in said)
    for step in (3, 4):
        assert flaxckpt.verify(tmp_path / f"run/{step}").ok
    for step in (1, 2):  # only what has all parts can be uploaded
        assert (tmp_path / f"local-1/{step}").exists() or (
            tmp_path / f"run/{step}"
        ).exists()


def test_links_unchanged_files_of_copies_and_uploads(tmp_path):
    run(tmp_path, ["save_partly_changed", 1, 2], copies=1, keep=2)
    run(tmp_path, ["save_partly_changed", 3, 3], copies=1, keep=3)  # others know of 2
    for tier in ("local-0", "local-1", "run"):
        for writer in (0, 1):
            for name in (f"{writer}.0/split", f"{writer}.small.0"):
                inodes = {
                    (tmp_path / tier / f"{step}/state/d" / name).stat().st_ino
                    for step in (1, 2, 3)
                }
                assert len(inodes) == (1 if name.endswith("split") else 3), name
        assert flaxckpt.verify(tmp_path / tier / "3").ok


@pytest.mark.slow
def test_copies_damaged_file_instead_of_linking_it(tmp_path):
    run(tmp_path, ["save_partly_changed", 1, 1], copies=1, keep=2)
    flip(tmp_path / "local-0/1/state/d/1.0/split")  # the copy of the part of process 1
    flip(tmp_path / "run/1/state/d/0.0/split")
    run(tmp_path, ["save_partly_changed", 2, 2], copies=1, keep=2)
    for tier in ("local-0", "local-1", "run"):
        assert flaxckpt.verify(tmp_path / tier / "2").ok


@pytest.mark.slow
def test_places_copies_in_other_failure_domains(tmp_path):
    do = [["save", 1], ["wait_for_copies"]]
    run(tmp_path, *do, count=4, copies=1, domains="aabb")
    for index, others in ((0, "23"), (1, "23"), (2, "01"), (3, "01")):
        names = {p.name[0] for p in (tmp_path / f"local-{index}/1/state/d").iterdir()}
        assert names <= {str(index), "t", *others}
        assert len(names & {*others}) == 1


@pytest.mark.slow
def test_simulation_matches_bytes_written_and_copied(tmp_path):
    said = run(tmp_path, ["save_planned"], count=4, copies=1)
    planned = said[0]["save_planned"]
    tier = planned["tier"]
    for index in range(4):
        step = tmp_path / f"local-{index}/1"
        sizes = {str(p): p.stat().st_size for p in step.rglob("*") if p.is_file()}
        own = sum(n for name, n in sizes.items() if f"/d/{index}." in name)
        assert own == pytest.approx(planned["written_bytes"][index], rel=0.01)
        assert sum(sizes.values()) == pytest.approx(tier["disk_bytes"][index], rel=0.01)
    remove_steps(tmp_path / "run")
    shutil.copytree(tmp_path, tmp_path / "saved")
    said = run(tmp_path, ["restore_planned"], count=4, copies=1)
    pulled = [each["from_peers"] for each in said]
    assert pulled == pytest.approx(tier["pulled_bytes"], rel=0.01)
    for index in range(4):
        shutil.rmtree(tmp_path / f"local-{index}")
        if index != tier["lost"]:
            (tmp_path / f"saved/local-{index}").rename(tmp_path / f"local-{index}")
    said = run(tmp_path, ["restore_planned"], count=4, copies=1)
    pulled = [each["from_peers"] for each in said]
    assert pulled == pytest.approx(tier["lost_pulled_bytes"], rel=0.01)
    assert all(each["from_directory"] == 0 for each in said)


def test_keeps_newest_step_with_copies(tmp_path):
    do = [["save_with_copies", 1], ["wait_for_uploads"]]
    do += [["save", 2], ["wait_for_uploads"]]
    (told, _) = run(tmp_path, *do, copies=1, keep=2)
    assert told["save_with_copies"] == 1
    for index in range(2):  # as if its copies were still being made
        (tmp_path / f"local-{index}/2/COPIES.1").unlink()
    (told, _) = run(tmp_path, ["prune"], ["explain"], copies=1, keep=1)
    why = ["staging: newest with copies", "staging: 1 copy at other processes"]
    assert told["explain"]["1"][-2:] == why
    run(tmp_path, ["save", 3], ["wait_for_copies"], ["save", 4], copies=1)
    assert not (tmp_path / "local-0/1").exists()


@pytest.mark.slow
def test_prune_keeps_whole_step_when_newer_one_is_lost(tmp_path):
    run(tmp_path, ["save", 1], ["save", 2], ["wait_for_uploads"], keep=2)
    remove_steps(tmp_path / "run")
    for file in (tmp_path / "local-1/2/state/d").glob("1.*"):
        shutil.rmtree(file) if file.is_dir() else file.unlink()
    said = run(tmp_path, ["restore"], ["prune"], ["restore"], keep=1)
    assert all(each["restore"] == 1 for each in said)


def test_rejects_shared_staging_directory(tmp_path):
    said = run(tmp_path, ["failing_save", 1], staging="same")
    for each in said:
        name, text = each["failing_save"]
        assert name == "OptionError"
        assert "process 0, process 1 have the same staging directory" in text


@pytest.mark.parametrize(
    "names",
    [["local-0", None], pytest.param([None, "local-1"], marks=pytest.mark.slow)],
)
def test_rejects_staging_at_some_processes_only(tmp_path, names):
    do = [["failing_restore"], ["failing_save", 1]]
    has, other = (1, 0) if names[0] is None else (0, 1)
    said = run(tmp_path, *do, directories=names, closes=False)
    for _, text in (each[name] for each in said for (name, *_) in do):
        assert "all processes must pass staging=, or none" in text
        assert f"process {has}: has staging" in text
        assert f"process {other}: has none" in text


@pytest.mark.parametrize("refused", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_other_processes_learn_of_a_refused_process_at_once(tmp_path, refused):
    owner = tmp_path / f"local-{refused}/STAGING_OF"
    owner.parent.mkdir()
    owner.write_text("/another/run\n")
    said = run(tmp_path, ["failing_save", 1], closes=False)
    reason = said[refused]["refused"]
    _, text = said[1 - refused]["failing_save"]
    assert "belongs to /another/run" in reason
    assert f"process {refused}: {reason[:40]}" in text


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"copies": 1, "copies_of": {"1": 0}}, "the same staging_copies, but"),
        (
            {"certificates": {"0": "one", "1": "other"}},
            "the same peer_certificate, but",
        ),
        pytest.param(
            {"certificates": {"0": "one", "1": None}},
            "process 1: none",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"copies": 1, "domains": ["a", None]},
            "failure_domain has returned None for process 1",
            marks=pytest.mark.slow,
        ),
        ({"copies": 1, "domains": "a"}, "failure_domain has raised IndexError"),
    ],
)
def test_first_save_refuses_options_that_do_not_fit(tmp_path, given, why):
    if "certificates" in given:
        made = {name: tmp_path / name for name in ("one", "other")}
        for name, directory in made.items():
            directory.mkdir()
            made[name] = jobs.make_certificate(directory)
        named = given["certificates"].items()
        given = {"certificates": {rank: made.get(name) for rank, name in named}}
    for each in run(tmp_path, ["failing_save", 1], **given):
        assert why in each["failing_save"][1]


@pytest.mark.slow
def test_rejects_zarr_2_on_opening(tmp_path):
    said = run(tmp_path / "run", zarr_version=2)
    assert all("leave out zarr_version" in each["refused"] for each in said)


def test_deleted_step_does_not_return(tmp_path):
    do = [["save", 1], ["save", 2], ["wait_for_copies"], ["wait_for_uploads"]]
    said = run(tmp_path, *do, ["delete", 2], ["restore"], copies=1, keep=2)
    assert all(each["restore"] == 1 for each in said)
    said = run(tmp_path, ["restore"], ["steps"], keep=2)
    assert all(each["restore"] == 1 and each["steps"] == [1] for each in said)


@pytest.mark.slow
def test_single_process_run_continues_with_two_processes(tmp_path):
    staging = tmp_path / "local-0"
    with flaxckpt.Checkpointer(tmp_path / "run", staging=staging) as ckpt:
        ckpt.save(1, {"x": states.values(1)["large"]})
    remove_steps(tmp_path / "run")
    (staging / "1/NOT_UPLOADED").touch()
    said = run(tmp_path, ["save", 2], ["steps"])
    assert all(each["steps"][-1] == 2 for each in said)
    assert flaxckpt.verify(tmp_path / "run/1").ok


@pytest.mark.parametrize("pin", ["pin", "pin_late"])
def test_unpin_in_run_directory_outlives_loss_of_disk_of_process_0(tmp_path, pin):
    do = [["save", 1], ["wait_for_copies"], ["wait_for_uploads"], [pin, 1]]
    do += [["wait_for_uploads"], ["explain"]]
    for each in run(tmp_path, *do, copies=1):
        assert "pinned" in each["explain"]["1"]
        assert "staging: not uploaded" not in each["explain"]["1"]
    pinned = tmp_path / "run/1/PINNED"
    pinned.unlink()
    shutil.rmtree(tmp_path / "local-0")
    run(tmp_path, ["restore"], ["wait_for_uploads"], copies=1)
    assert not pinned.exists()


@pytest.mark.parametrize(
    "patience", [[0, 0], pytest.param([0, None], marks=pytest.mark.slow)]
)
def test_all_processes_learn_that_a_wait_was_too_short(tmp_path, patience):
    said = run(tmp_path, ["save", 1], ["fail_to_wait", patience])
    for kind, text in (each["fail_to_wait"] for each in said):
        assert kind == "CheckpointTimeoutError"
        assert "call wait_for_uploads() again" in text


def test_upload_waits_for_no_process_that_ends(tmp_path):
    do = [["save", 1], ["wait_for_uploads"], ["pin_until_upload_fails", 1]]
    ((told,), _) = [
        each["pin_until_upload_fails"] for each in run(tmp_path, *do, closes=False)
    ]
    assert "process 1: answers no more calls" in told["error"]
