"""Metadata of checkpoints as a short text, and as a card for notebooks."""

import numpy as np
import pytest

import flaxckpt
from flaxckpt import transforms
from tests import GOLDEN


def test_metadata_repr_stays_short_with_many_leaves(tmp_path):
    state = {f"layers_{n}": {"w": np.ones(2, np.float32)} for n in range(500)}
    metrics = {f"m{n}": n + 1 / 3 for n in range(20)}
    with flaxckpt.Checkpointer(tmp_path) as run:
        run.save(7, state, metrics=metrics, metadata={"seed": 1}).wait()
    metadata = flaxckpt.metadata(tmp_path)
    *first, second, third = repr(metadata).splitlines()
    headline = "".join(first)
    assert headline.startswith(f"<CheckpointMetadata {tmp_path}/7:")
    assert ": flaxckpt, step 7, " in " ".join(headline.split())
    assert headline.endswith(", 500 leaves, 4 kB")
    assert second == (
        "  metrics: m0=0.333333, m1=1.33333, m2=2.33333, m3=3.33333, … 16 more"
    )
    assert third == "  custom: seed>"
    assert "layers_" not in repr(metadata)


def test_metadata_repr_puts_long_path_on_own_line(tmp_path):
    state = {"w": np.ones(2, np.float32)}
    flaxckpt.save(tmp_path / ("long" * 20), state)
    path, headline = repr(flaxckpt.metadata(tmp_path / ("long" * 20))).splitlines()
    assert path == f"<CheckpointMetadata {tmp_path}/{'long' * 20}:"
    assert headline.startswith("  flaxckpt, saved ")
    flaxckpt.save("memory://s/a", state)
    [line] = repr(flaxckpt.metadata("memory://s/a")).splitlines()
    assert line.startswith("<CheckpointMetadata memory://s/a: flaxckpt, saved ")


def test_metadata_repr_reports_transforms(tmp_path):
    flaxckpt.save(tmp_path / "a", {"w": np.ones(2)})
    cast = [transforms.cast("w", "bfloat16")]
    flaxckpt.save(tmp_path / "b", {"w": np.ones(2)}, transforms=cast)
    assert "transformed by: cast(" in repr(flaxckpt.metadata(tmp_path / "b"))


@pytest.mark.parametrize("name", ["t5x-3/checkpoint_7", "flax-msgpack/checkpoint_3"])
def test_metadata_repr_of_other_formats_is_short(name):
    assert len(repr(flaxckpt.metadata(GOLDEN / name)).splitlines()) <= 3


def test_card_shows_metrics_and_branches_and_escapes_names(tmp_path):
    state = {"params": {"<b>": np.ones(3), "w": np.ones(2)}, "<i>": np.ones(2)}
    with flaxckpt.Checkpointer(tmp_path) as run:
        run.save(7, state, metrics={"eval/loss": 0.25, "<script>": 1.0}).wait()
    card = flaxckpt.metadata(tmp_path)._repr_html_()
    assert "Checkpoint 7" in card
    assert ">eval/loss<" in card
    assert ">0.25<" in card
    assert ">params<" in card
    assert ">2<" in card
    assert "&lt;script&gt;" in card
    assert "<script>" not in card
    assert "<i>" not in card


def test_card_truncates_many_branches(tmp_path):
    flaxckpt.save(tmp_path / "a", {f"w{n}": np.ones(1) for n in range(40)})
    assert "… and 28 more" in flaxckpt.metadata(tmp_path / "a")._repr_html_()


def test_notebooks_show_reports_as_print_does(tmp_path):
    pretty = pytest.importorskip("IPython.lib.pretty").pretty
    state = {"params": {"w": np.ones(2)}}
    for name in ("a", "b"):
        flaxckpt.save(tmp_path / name, state)
    for report in (
        flaxckpt.plan(tmp_path / "a", state),
        flaxckpt.verify(tmp_path / "a"),
        flaxckpt.diff(tmp_path / "a", tmp_path / "b"),
        flaxckpt.suggest(tmp_path / "a", state),
    ):
        assert pretty(report) == str(report)
