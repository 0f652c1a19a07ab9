"""Scalars are read from real event files, named as T5X does, and only once."""

import logging
import math
import struct

import pytest

pytest.importorskip("tensorboard", reason="needs tensorboard")

from tensorboard.compat.proto import event_pb2, summary_pb2
from tensorboard.plugins.scalar.summary_v2 import scalar_pb
from tensorboard.plugins.text.summary_v2 import text_pb
from tensorboard.summary.writer.event_file_writer import EventFileWriter
from tensorboard.util.tensor_util import make_tensor_proto

import flaxckpt
from flaxckpt import policies
from flaxckpt.integrations.tensorboard import EventFiles
from tests.helpers import programs
from tests.helpers.files import flip_bit


@pytest.fixture
def write(tmp_path):
    """Writes summaries as TensorBoard does; one file for each directory and name."""
    writers = {}

    def write(run, step, *summaries, file="a"):
        if (run, file) not in writers:
            writers[run, file] = EventFileWriter(
                str(tmp_path / run), filename_suffix=f".{len(writers):03}{file}"
            )
        values = [value for summary in summaries for value in summary.value]
        event = event_pb2.Event(step=step, summary=summary_pb2.Summary(value=values))
        writers[run, file].add_event(event)
        writers[run, file].flush()

    yield write
    for writer in writers.values():
        writer.close()


def old(tag, number):
    """A scalar as writers of TensorFlow 1 and torch have it."""
    return summary_pb2.Summary(
        value=[summary_pb2.Summary.Value(tag=tag, simple_value=number)]
    )


def tensor(tag, value, **options):
    proto = make_tensor_proto(value, **options)
    return summary_pb2.Summary(value=[summary_pb2.Summary.Value(tag=tag, tensor=proto)])


def test_metric_name_joins_directory_and_tag(tmp_path, write):
    write("", 1, old("loss", 4.0))
    write("eval", 1, old("loss", 3.0), scalar_pb("accuracy", 0.5))
    write("eval/long", 2, scalar_pb("/a//b", 0.25))
    assert EventFiles(tmp_path)() == {
        1: {"loss": 4.0, "eval/loss": 3.0, "eval/accuracy": 0.5},
        2: {"eval/long//a//b": 0.25},
    }


def test_last_event_of_step_counts(tmp_path, write):
    write("train", 5, old("loss", 3.0), old("norm", 1.0))
    write("train", 5, old("loss", 2.0))
    assert EventFiles(tmp_path)() == {5: {"train/loss": 2.0, "train/norm": 1.0}}
    write("train", 5, old("loss", 1.0), file="b")
    assert EventFiles(tmp_path)() == {5: {"train/loss": 1.0, "train/norm": 1.0}}


def test_reads_only_single_numbers_as_metrics(tmp_path, write):
    write(
        "",
        1,
        tensor("integer", 7),
        tensor("double", math.pi, dtype="float64"),
        tensor("nan", float("nan")),
        tensor("vector", [1.0]),
        tensor("string", "text"),
        text_pb("text", "words"),
    )
    write("", 2)
    [found] = EventFiles(tmp_path)().values()
    assert math.isnan(found.pop("nan"))
    assert found == {"integer": 7.0, "double": math.pi}


def test_second_call_reads_only_new_events(tmp_path, write):
    events = EventFiles(tmp_path)
    assert events() == {}
    write("", 1, old("loss", 3.0))
    assert events() == {1: {"loss": 3.0}}
    [file] = tmp_path.glob("*tfevents*")
    first = file.stat().st_size
    write("", 2, old("loss", 2.0))
    write("eval", 2, old("loss", 1.0))
    # Were the beginning read once more, it would be found damaged.
    with file.open("r+b") as opened:
        opened.write(bytes(first))
    assert events() == {1: {"loss": 3.0}, 2: {"loss": 2.0, "eval/loss": 1.0}}


def test_ignores_partial_event_until_complete(tmp_path, write):
    write("", 1, old("loss", 3.0))
    [file] = tmp_path.glob("*tfevents*")
    before = file.stat().st_size
    write("", 2, old("loss", 2.0))
    whole = file.read_bytes()
    copy = tmp_path / "copy" / file.name
    copy.parent.mkdir()
    events = EventFiles(copy.parent)
    for end in range(before, len(whole)):
        copy.write_bytes(whole[:end])
        assert events() == {1: {"loss": 3.0}}
    copy.write_bytes(whole)
    assert events() == {1: {"loss": 3.0}, 2: {"loss": 2.0}}


@pytest.mark.parametrize("place", [3, 9, 20, -1])
def test_reads_damaged_file_up_to_damage_and_warns_once(tmp_path, write, place, caplog):
    write("", 1, old("loss", 3.0))
    [file] = tmp_path.glob("*tfevents*")
    start = file.stat().st_size
    write("", 2, old("loss", 2.0))
    flip_bit(file, start + place if place >= 0 else place)
    write("eval", 2, old("loss", 1.0))
    events = EventFiles(tmp_path)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert events() == {1: {"loss": 3.0}, 2: {"eval/loss": 1.0}}
    [message] = [record.getMessage() for record in caplog.records]
    assert str(file) in message
    assert f"after {start} bytes" in message


def test_length_beyond_file_allocates_no_memory(tmp_path):
    from flaxckpt.integrations import tensorboard

    length = struct.pack("<Q", 2**62)
    header = length + struct.pack("<I", tensorboard._masked_crc(length))
    (tmp_path / "events.out.tfevents.1").write_bytes(header + bytes(100))
    assert EventFiles(tmp_path)() == {}


def test_warns_about_missing_directory(tmp_path, caplog):
    assert EventFiles(tmp_path / "logs")() == {}
    assert "logs does not exist" in caplog.text


def test_does_not_import_tensorflow():
    code = "import sys, flaxckpt.integrations.tensorboard; print(*sys.modules)"
    assert "tensorflow" not in programs.run("-c", code).stdout.split()


def test_error_without_tensorboard_names_the_extra_to_install():
    code = (
        "import sys; sys.modules['tensorboard'] = None\n"
        "import flaxckpt.integrations.tensorboard"
    )
    told = programs.run("-c", code, code=1).stderr
    assert "OptionError" in told
    assert "pip install 'flaxckpt[tensorboard]'" in told


def test_policies_keep_the_best_steps_by_tensorboard_metrics(tmp_path, write):
    ckpt = flaxckpt.Checkpointer(
        tmp_path / "run",
        keep=[policies.BestN(1, "eval/loss", "min")],
        metrics_from=EventFiles(tmp_path),
    )
    with ckpt:
        for step, loss in enumerate([3.0, 1.0, 2.0, 4.0]):
            write("eval", step, old("loss", loss))
            ckpt.save(step, {"n": step})
    assert ckpt.steps() == [1, 3]
