"""Whole files in the wrong place: of another chunk, leaf or step."""

import itertools
import logging
import shutil

import numpy as np
import pytest

import flaxckpt
from flaxckpt import errors
from tests.faults.test_damage import ITEMS, JSON_ITEM, LOSSES, UNREAD, Iterator, is_same
from tests.helpers import chunks, old_stores, run_files

LAYOUTS = {
    "files": {},
    "files, compact": {"codec": "compact"},
    "files, zstd": {"codec": "zstd"},
    "files, zarr 2": {"zarr_version": 2},
    "ocdbt": {},
    "ocdbt, compact": {"codec": "compact"},
    "ocdbt, zarr 2": {"zarr_version": 2},
}
"""In directories of chunk files, as of old, or in databases."""

OLD = {f"old {name}": LAYOUTS[name] for name in ("ocdbt", "ocdbt, compact")}
"""Databases of TensorStore without digests, as before version 3."""

CASES = [
    pytest.param(case, marks=[pytest.mark.slow] * (n % 3 > 0))
    for n, case in enumerate(LAYOUTS)
]

CHUNK_BYTES = 2**13


def state(step, rows=0):
    """Leaves of equal shapes; their chunks have equal sizes, also compressed."""
    rng = np.random.default_rng(step)

    def leaf(*shape):
        return rng.integers(0, 2**32, shape, np.uint32)

    leaves = {"x": leaf(6, 1024), "y": leaf(6, 1024), "few": leaf(30), "some": leaf(30)}
    if rows:
        leaves |= {"wide": leaf(rows, 1024), "deep": leaf(rows, 1024)}
    return {"params": leaves, "numbers": {"step": step}, "texts": {"name": f"s{step}"}}


def save_run(root, case, *, items="state", first=1, rows=0, **options):
    """Saves a run of two steps; returns step -> state."""
    layout = layout_of(case, **options)
    states = {1: state(first, rows), 2: state(first + 1, rows)}
    with flaxckpt.Checkpointer(root, layout=layout, items=items) as ckpt:
        for step, values in states.items():
            ckpt.save(
                step,
                values,
                metrics={"loss": 0.5 + first + step},
                dataset=Iterator(10 * (step + first)),
                json={"config": [step, first]} if items != "state" else {},
            )
    if case.startswith("files"):
        for step in states:
            trees = ("state",) if items == "state" else items
            old_stores.make_directories(root / str(step), trees)
    return states


def layout_of(case, **options):
    return flaxckpt.ArrayLayout(**(LAYOUTS | OLD)[case], **options)


def files_of(step):
    return {
        file.relative_to(step).as_posix(): file.read_bytes()
        for file in sorted(step.rglob("*"))
        if file.is_file()
    }


def replace(path, content):
    made = path.with_name(path.name + ".made")
    made.write_bytes(content)
    made.replace(path)


class Run:
    """A run whose step 2 gets files of other places."""

    def __init__(self, root, case, *, items="state", **options):
        self.states = save_run(root, case, items=items, **options)
        self.ckpt = flaxckpt.Checkpointer(root, items=items)
        self.root, self.path = root, root / "2"
        self.files = files_of(self.path)

    def check(self, name, *, memory_map=True):
        """Asserts that the wrong content of `name` is found by all readers."""
        assert not flaxckpt.verify(self.root, step=2).ok, f"{name}: not found"
        dataset = Iterator()
        found = self.ckpt.restore(dataset=dataset, memory_map=memory_map)
        step = self.ckpt.restored_step
        assert is_same(self.states[step], found), f"{name}: wrong values"
        assert dataset.position == 10 * (step + 1)
        harmless = {*UNREAD, *LOSSES, JSON_ITEM}
        assert step == 1 or name in harmless, f"{name}: not noticed"
        if step == 2:
            assert self.ckpt.metrics(2) in ({}, {"loss": 3.5}), name
        for leaf in ("x", "y"):
            wanted = self.states[2]["params"][leaf]
            try:
                values = flaxckpt.open_leaf(self.path, f"params/{leaf}").read().result()
            except errors.CheckpointError:
                continue
            assert np.array_equal(values, wanted), f"{name}: wrong values of {leaf}"

    def heal(self):
        for name, content in self.files.items():
            if (self.path / name).read_bytes() != content:
                replace(self.path / name, content)
        (self.path / run_files.DAMAGED).unlink(missing_ok=True)


@pytest.mark.slow
@pytest.mark.parametrize("items", ["state", ITEMS], ids=["state", "items"])
@pytest.mark.parametrize("case", CASES)
def test_detects_file_from_another_place(tmp_path, monkeypatch, caplog, case, items):
    caplog.set_level(logging.CRITICAL, logger="flaxckpt")
    options = {"checksum": False} if "zarr 2" in case else {}
    options["chunk_bytes"] = CHUNK_BYTES
    run = Run(tmp_path / "run", case, items=items, **options)
    others = files_of(run.root / "1")
    tried = 0
    for name, content in run.files.items():
        wrong = {
            other
            for other in (*run.files.values(), *others.values())
            if len(other) == len(content) and other != content
        }
        for n, other in enumerate(sorted(wrong)[:4]):
            replace(run.path / name, other)
            run.check(name, memory_map=n % 2 == 0)
            run.heal()
            tried += 1
    assert tried >= (20 if case.startswith("files") else 4)
    run.ckpt.restore()
    assert run.ckpt.restored_step == 2, "all is healed"


@pytest.mark.parametrize("case", CASES)
def test_detects_directory_of_another_step(tmp_path, monkeypatch, caplog, case):
    caplog.set_level(logging.CRITICAL, logger="flaxckpt")
    run = Run(tmp_path / "run", case, items=ITEMS, chunk_bytes=CHUNK_BYTES)
    aside = tmp_path / "aside"
    for name in (*ITEMS, "metrics", "dataset", "config"):
        (run.path / name).rename(aside)
        shutil.copytree(run.root / "1" / name, run.path / name)
        run.check(JSON_ITEM if name == "config" else f"{name}/{name}")
        shutil.rmtree(run.path / name)
        aside.rename(run.path / name)
        run.heal()
    run.path.rename(aside)
    shutil.copytree(run.root / "1", run.path)
    assert not flaxckpt.verify(run.root, step=2).ok
    for load in (run.ckpt.restore, flaxckpt.load):
        with pytest.raises(errors.DamagedCheckpointError, match="saved as step 1"):
            load(**({"step": 2} if load == run.ckpt.restore else {"path": run.root}))
    with pytest.raises(errors.DamagedCheckpointError, match="saved as step 1"):
        flaxckpt.convert(run.root, tmp_path / "y.safetensors")
    assert not (tmp_path / "y.safetensors").exists()


@pytest.mark.parametrize("is_by_step", [True, False])
def test_detects_metrics_of_another_copy(tmp_path, caplog, is_by_step):
    caplog.set_level(logging.CRITICAL, logger="flaxckpt")
    run = Run(tmp_path / "run", "ocdbt")
    copies = tmp_path / "copies"
    for step in (1, 2):
        source = {"src": run.root, "step": step}
        if not is_by_step:
            source = {"src": run.root / str(step)}
        flaxckpt.convert(**source, dst=copies / str(step), format="orbax")
    shutil.rmtree(copies / "2/metrics")
    shutil.copytree(copies / "1/metrics", copies / "2/metrics")
    assert not flaxckpt.verify(copies, step=2).ok
    assert flaxckpt.metadata(copies, step=2).metrics == {}


@pytest.mark.parametrize("case", CASES)
def test_detects_incomplete_backup_over_older_one(tmp_path, monkeypatch, caplog, case):
    caplog.set_level(logging.CRITICAL, logger="flaxckpt")
    run = Run(tmp_path / "run", case, chunk_bytes=CHUNK_BYTES)
    save_run(tmp_path / "newer", case, first=5, chunk_bytes=CHUNK_BYTES)
    newer = files_of(tmp_path / "newer" / "2")
    orders = (sorted(newer), sorted(newer, reverse=True))
    for order, count in itertools.product(orders, (1, len(newer) // 2, len(newer) - 1)):
        for name in order[:count]:
            (run.path / name).parent.mkdir(parents=True, exist_ok=True)
            replace(run.path / name, newer[name])
        if files_of(run.path) == newer:
            continue  # the rest was equal
        assert not flaxckpt.verify(run.root, step=2).ok, order[:count]
        found = run.ckpt.restore()
        step = run.ckpt.restored_step
        assert is_same(run.states[step], found), order[:count]
        for name in newer.keys() - run.files.keys():
            (run.path / name).unlink(missing_ok=True)
        run.heal()


@pytest.mark.sampled(5)
@pytest.mark.parametrize("way", ["saved", "converted"])
@pytest.mark.parametrize(
    "case", ["files", "files, compact", "ocdbt", "ocdbt, compact", *OLD]
)
def test_detects_swapped_chunks_of_any_size(tmp_path, case, way):
    states = save_run(tmp_path / "run", case, rows=300)
    path, other = tmp_path / "run/2", tmp_path / "run/1"
    if way == "converted":
        for step in (path, other):
            new = tmp_path / f"new {step.name}"
            flaxckpt.convert(step, new, layout=layout_of(case))
        path, other = tmp_path / "new 2", tmp_path / "new 1"
    if case in OLD:
        for step in (path, other):
            old_stores.make_databases(step)
    assert is_same(states[2], flaxckpt.load(path))
    chunks, older = chunks_of(path / "state"), chunks_of(other / "state")
    leaves = ("wide", "deep", "x", "few")
    of_leaf = {leaf: [n for n in chunks if f"params.{leaf}/" in n] for leaf in leaves}
    assert all(of_leaf.values()), of_leaf
    [wide], [deep] = of_leaf["wide"], of_leaf["deep"]
    for name, wrong in [
        *((name, older[name]) for [name] in of_leaf.values()),
        (wide, chunks[deep]),
    ]:
        put_chunk(path / "state", name, wrong)
        assert not flaxckpt.verify(path).ok, name
        for memory_map in (True, False):
            with pytest.raises(errors.DamagedCheckpointError, match="not the chunk"):
                flaxckpt.load(path, memory_map=memory_map)
        leaf = name.split("/")[0].replace(".", "/")
        with pytest.raises(errors.DamagedCheckpointError, match="not the chunk"):
            flaxckpt.open_leaf(path, leaf)
        with pytest.raises(errors.DamagedCheckpointError, match="not the chunk"):
            flaxckpt.convert(path, tmp_path / "copy.safetensors")
        put_chunk(path / "state", name, chunks[name])
    assert is_same(states[2], flaxckpt.load(path))


def chunks_of(root):
    """Returns the stored chunks of a state: name of the chunk -> bytes."""
    if not (root / "manifest.ocdbt").exists():
        return {name: text for name, text in files_of(root).items() if "/c" in name}
    values = chunks.read_tree(root).items()
    return {key: read_value(root, v) for key, v in values if "/c" in key}


def read_value(root, value):
    if isinstance(value, bytes):
        return value
    return (root / value.file).read_bytes()[value.offset :][: value.size]


def put_chunk(root, name, content):
    """Replaces a chunk; in a database, with the bytes that have room at its place."""
    if not (root / "manifest.ocdbt").exists():
        replace(root / name, content)
        return
    place = chunks.read_tree(root)[name]
    assert not isinstance(place, bytes), "give it more bytes"
    whole = bytearray((root / place.file).read_bytes())
    end = place.offset + place.size
    whole[place.offset : end] = content[: place.size].ljust(place.size, b"\0")
    replace(root / place.file, bytes(whole))


def test_detects_values_of_another_single_array_state(tmp_path):
    for name, value in (("a", 1.0), ("b", 2.0)):
        flaxckpt.save(tmp_path / name, np.full(3, value))
    file = "state/d/0.small.0"
    shutil.copy(tmp_path / "b" / file, tmp_path / "a" / file)
    assert not flaxckpt.verify(tmp_path / "a").ok
    with pytest.raises(errors.DamagedCheckpointError, match="not the chunk saved here"):
        flaxckpt.load(tmp_path / "a")
