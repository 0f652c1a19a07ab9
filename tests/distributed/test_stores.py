"""What two processes save and restore together in object stores."""

import shutil

import pytest

import flaxckpt
from tests.distributed import jobs

pytestmark = pytest.mark.multiprocess

LAYOUTS = ["chunks", "default", "zstd", "compact"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["moto", "seaweed"])
def test_two_processes_save_to_store_together(store_path, tmp_path, kind):
    path = store_path(kind)
    said = jobs.run("bucket", 2, tmp_path, layouts=LAYOUTS, url=str(path))
    assert said["bucket"] == ({"ok": True},) * 2
    for layout in LAYOUTS:
        run = flaxckpt.Checkpointer(f"{path}/{layout}", read_only=True)
        assert run.steps() == [2, 3]
    keys = flaxckpt.Checkpointer(path, read_only=True).directory.keys()
    assert not [key for key in keys if "tmp" in key], "all locks are released"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["moto", "seaweed"])
def test_processes_with_local_disks_upload_to_a_store(store_path, tmp_path, kind):
    given = {"url": str(store_path(kind)), "copies": 1}
    do = [["save", 1], ["save", 2], ["wait_for_copies"], ["wait_for_uploads"]]
    said = jobs.run("parts", 2, tmp_path, do=do, **given)["parts"]
    assert all(each["save"] == "staging" for each in said)
    assert flaxckpt.verify(given["url"]).ok
    for lost in ([0], [0, 1]):
        for index in lost:
            shutil.rmtree(tmp_path / f"local-{index}")
        said = jobs.run("parts", 2, tmp_path, do=[["restore"]], **given)["parts"]
        assert all(each["restore"] == 2 for each in said)
        if lost == [0]:
            assert all(each["from_directory"] == 0 for each in said)
