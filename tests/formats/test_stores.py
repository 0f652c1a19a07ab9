"""Checkpoints of formats that are not read from stores say where to take them."""

import pytest

import flaxckpt
from flaxckpt import errors
from tests import GOLDEN
from tests.helpers import faulty_store as faulty


def upload(source, target):
    files = [source] if source.is_file() else sorted(source.rglob("*"))
    for file in files:
        if file.is_file():
            name = file.relative_to(source).as_posix()
            there = target if file == source else target / name
            there.write_bytes(file.read_bytes())


SAMPLES = (
    "flax-msgpack/checkpoint_3",
    "safetensors/sharded",
    "safetensors/silero_vad_16k.safetensors",
    "streaming/streaming_params",
    "t5x-3/checkpoint_7",
    "t5x-3/single_3",
)


@pytest.mark.parametrize("name", SAMPLES)
def test_error_advises_to_copy_unsupported_formats_to_a_disk(name, tmp_path):
    target = faulty.new_path("formats") / "run" / name.rpartition("/")[2]
    upload(GOLDEN / name, target)
    acts = (
        lambda: flaxckpt.load(target),
        lambda: flaxckpt.verify(target),
        lambda: flaxckpt.convert(target, tmp_path / "there"),
    )
    for act in acts:
        with pytest.raises(errors.CheckpointFormatError, match="to a disk first") as it:
            act()
        assert str(target) in str(it.value)
        assert len(str(it.value).splitlines()) < 15
