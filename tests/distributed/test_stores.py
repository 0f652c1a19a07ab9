"""What two processes save and restore together in object stores."""

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
