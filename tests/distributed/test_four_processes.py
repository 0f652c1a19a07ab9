"""What four processes save, and what becomes of it with others."""

import pytest

import flaxckpt
from tests.distributed import jobs, states

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    directory = tmp_path_factory.mktemp("four")
    given = {"layouts": ["chunks", "compact"], "files": False}
    return directory, jobs.run("save,sizes,together,late", 4, directory, **given)


def test_four_processes_save_and_restore_every_leaf(job):
    directory, said = job
    assert len({str(each) for each in said["save"]}) == 1
    for layout in ("chunks", "compact"):
        assert flaxckpt.verify(directory / "save" / layout / "2").ok
    found = flaxckpt.load(directory / "save/chunks")
    assert found["text"] == states.TEXT


def test_each_of_four_processes_reads_quarter(job):
    assert all(said["share"] < 0.3 for said in job[1]["sizes"])


def test_other_three_processes_name_late_one(job):
    *told, nothing = [said["told"] for said in job[1]["late"]]
    assert nothing is None
    assert all("process 3: has not reached 'written'" in text for text in told)
    assert not any("process 1: " in text or "process 2: " in text for text in told)


def test_two_processes_restore_four_process_checkpoints(job, tmp_path):
    (tmp_path / "restore").symlink_to(job[0] / "save")
    given = {"layouts": ["chunks", "compact"], "meshes": ["rows", "mixed"]}
    assert jobs.run("restore", 2, tmp_path, **given)["restore"]
