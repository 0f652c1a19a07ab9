"""What no reader would take is refused at the save, and nothing is taken late."""

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx, struct
from flax.core import FrozenDict

import flaxckpt
from flaxckpt import errors, transforms
from tests.helpers import seams, strategies

MIB = 2**20


def nested(depth, inner=1):
    """Lists in lists."""
    for _ in range(depth):
        inner = [inner]
    return inner


def boxed(depth):
    """Boxes in boxes."""
    box = jnp.ones(2)
    for _ in range(depth):
        box = linen.Partitioned(box, names=(None,))
    return box


@struct.dataclass
class Record:
    child: object
    text: object = struct.field(pytree_node=False, default="")


def saves(tmp_path, state, **options):
    """Saves with `save` and with a `Checkpointer`; gives the errors of the calls."""
    raised = []
    with pytest.raises(errors.CheckpointError) as info:
        flaxckpt.save_async(tmp_path / "c", state, **options)
    raised.append(info.value)
    layout = options.pop("layout", None)
    with flaxckpt.Checkpointer(tmp_path / "run", layout=layout) as checkpointer:
        with pytest.raises(errors.CheckpointError) as info:
            checkpointer.save(1, state, **options)
        assert checkpointer.steps() == []
    assert not (tmp_path / "c").exists()
    return [*raised, info.value]


def assert_refused(tmp_path, state, error, *words, **options):
    """Asserts that a save is refused at the call, with these words in the error."""
    for found in saves(tmp_path, state, **options):
        assert type(found) is error
        assert len(str(found).splitlines()) < 15
        for word in words:
            assert word in str(found), (word, str(found))


# ---- arrays and names ---------------------------------------------------------------


@pytest.mark.parametrize(
    "leaf",
    [
        np.zeros((1,) * 33),
        np.zeros((1,) * 64, np.int8),
        jnp.zeros((1,) * 33),
        jax.random.split(jax.random.key(0), (1,) * 32),
    ],
    ids=["numpy", "64 axes", "jax", "keys"],
)
def test_rejects_too_many_axes(tmp_path, leaf):
    assert_refused(
        tmp_path, {"a": {"b": leaf}}, errors.UnsupportedLeafError, "a/b", "axes", "32"
    )


def test_maximum_number_of_axes_round_trips(tmp_path):
    state = {
        "numpy": np.zeros((1,) * 32),
        "keys": jax.random.split(jax.random.key(0), (1,) * 31),
    }
    flaxckpt.save(tmp_path / "c", state)
    strategies.assert_same(state, flaxckpt.load(tmp_path / "c"))


def test_rejects_too_many_chunks(tmp_path):
    layout = flaxckpt.ArrayLayout(chunk_bytes=1)
    state = {"a": np.zeros(2**20 + 1, np.int8), "b": np.zeros(3, np.int8)}
    assert_refused(
        tmp_path,
        state,
        errors.UnsupportedLeafError,
        *("1 leaf", "a: ", "1048577 chunks", "1048576", "chunk_bytes"),
        layout=layout,
    )


@pytest.mark.parametrize("leaf", [1, "text", None, np.ones(2)])
def test_rejects_names_too_long_for_databases(tmp_path, leaf):
    state = {"x" * MIB: leaf, "y": 1}
    assert_refused(tmp_path, state, errors.LeafNameError, "xxx", "32768 bytes")


def test_longest_name_round_trips(tmp_path):
    state = {"x" * 2**15: np.arange(3), "y": 1}
    flaxckpt.save(tmp_path / "c", state)
    strategies.assert_same(state, flaxckpt.load(tmp_path / "c"))


@pytest.mark.parametrize(
    "key", [2**63, -(2**63) - 1, 10**5000], ids=["64 bits", "negative", "huge"]
)
def test_rejects_int_keys_over_64_bits(tmp_path, key):
    assert_refused(tmp_path, {"a": {key: 1}}, errors.LeafNameError, "a: ", "64 bits")


def test_convert_rejects_too_many_chunks(tmp_path):
    flaxckpt.save(tmp_path / "c", {"a": np.zeros(2**20 + 1, np.int8)})
    layout = flaxckpt.ArrayLayout(chunk_bytes=1)
    with pytest.raises(errors.UnsupportedLeafError, match="1048577 chunks"):
        flaxckpt.convert(tmp_path / "c", tmp_path / "d", layout=layout)
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


# ---- texts --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    ["x" * (64 * MIB), "é" * (12 * MIB), "," * (9 * MIB), "[" * (5 * MIB)],
    ids=["long", "escaped", "commas", "brackets"],
)
def test_rejects_strings_over_read_limit(tmp_path, text):
    state = {"a": 1, "texts": [text, "short"]}
    with pytest.raises(errors.UnsupportedLeafError) as info:
        flaxckpt.save_async(tmp_path / "c", state)
    assert f"texts/0: found a str of {len(text)} characters" in str(info.value)
    assert not list(tmp_path.iterdir())


def test_long_strings_within_limit_round_trip(tmp_path):
    state = {"a": "x" * MIB, "b": "é" * MIB}
    flaxckpt.save(tmp_path / "c", state)
    assert flaxckpt.load(tmp_path / "c") == state


def test_rejects_static_fields_over_read_limit(tmp_path):
    with pytest.raises(errors.UnsupportedLeafError) as info:
        flaxckpt.save_async(tmp_path / "c", {"a": Record(1, "x" * (33 * MIB))})
    assert "a: found the static field 'text'" in str(info.value)
    many = [Record(1, "é" * MIB) for _ in range(6)]
    with pytest.raises(errors.UnsupportedLeafError, match="static field 'text'"):
        flaxckpt.save_async(tmp_path / "c", many)


@pytest.mark.parametrize("field", [nested(5000), 10**5000], ids=["list", "int"])
def test_accepts_static_fields_without_json_form(tmp_path, field):
    flaxckpt.save(tmp_path / "c", Record(np.ones(2), field))
    found = flaxckpt.load(tmp_path / "c", Record(np.zeros(2), field))
    assert found.text is field


def test_rejects_too_many_leaves_immediately(tmp_path, monkeypatch):
    seams.replace(monkeypatch, "orbax_json.max_bytes", 20_000)
    state = {f"layer {i}": np.zeros(2) for i in range(200)}
    with pytest.raises(errors.SaveFailedError, match=r"flaxckpt\.json.*20000"):
        flaxckpt.save_async(tmp_path / "c", state)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("leaves", [3, 30])
def test_does_not_commit_unparsable_manifest(tmp_path, monkeypatch, leaves):
    seams.replace(monkeypatch, "native_manifest.parsed_leaves", 10)
    row_of = seams.current("native_manifest.leaf_row")
    changed = lambda info: {**row_of(info), "role": "none"}  # noqa: E731
    seams.replace(monkeypatch, "native_manifest.leaf_row", changed)
    state = {str(i): None for i in range(leaves)} | {"w": np.zeros(2)}
    with pytest.raises(errors.SaveFailedError, match="none is not a role"):
        flaxckpt.save(tmp_path / "c", state)
    assert not list(tmp_path.iterdir())


# ---- nesting ------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [32, 64, 70, 1000, 100_000])
def test_rejects_too_deeply_nested_states(tmp_path, depth):
    state = {"a": nested(depth)}
    assert_refused(tmp_path, state, errors.LeafNameError, "a/0/0", "deep")


def test_nested_boxes_round_trip_up_to_limit(tmp_path):
    state = {"a": boxed(62)}
    flaxckpt.save(tmp_path / "c", state)
    strategies.assert_same_state(state, flaxckpt.load(tmp_path / "c"))
    (tmp_path / "other").mkdir()
    assert_refused(
        tmp_path / "other", {"a": boxed(70)}, errors.LeafNameError, "a/", "64 deep"
    )


def cyclic(kind):
    """A state that holds itself in `a/b`, or in a part of it."""
    if kind == "list":
        held = [1]
        held.append(held)
    elif kind == "dict":
        held = {"x": 1}
        held["again"] = held
    elif kind == "both":
        held = []
        held += [held, held]
    elif kind == "FrozenDict":
        inner = {}
        held = FrozenDict({"x": 1})
        held._dict["again"] = held
        inner["f"] = held
    elif kind == "NamedTuple":
        inner = []
        held = strategies.Pair(inner, 1)
        inner.append(held)
    else:
        held = Record(1)
        object.__setattr__(held, "child", held)
    return {"a": {"b": held}, "c": np.ones(2)}


@pytest.mark.parametrize(
    "kind", ["list", "dict", "both", "FrozenDict", "NamedTuple", "dataclass"]
)
def test_rejects_state_containing_itself(tmp_path, kind):
    assert_refused(
        tmp_path, cyclic(kind), errors.LeafNameError, "a/b/", "contains itself"
    )
    # After a RecursionError in jax, this would not fit on the stack any more.
    assert len(json.dumps(nested(sys.getrecursionlimit() // 2))) > 0
    flaxckpt.save(tmp_path / "ok", {"a": 1})
    with pytest.raises(errors.LeafNameError, match="contains itself"):
        flaxckpt.load(tmp_path / "ok", cyclic(kind))


class Cyclic(nnx.Module):
    def __init__(self):
        self.weight = nnx.Param(jnp.ones(2))
        self.me = self


def test_self_referencing_modules_round_trip(tmp_path):
    flaxckpt.save(tmp_path / "c", {"model": Cyclic()})
    found = flaxckpt.load(tmp_path / "c", {"model": Cyclic()})["model"]
    assert found.me is found


@pytest.mark.skipif(not hasattr(nnx, "data"), reason="this Flax takes no lists")
def test_rejects_self_containing_list_in_module(tmp_path):
    model = Cyclic()
    model.held = nnx.data(cyclic("list"))
    assert_refused(
        tmp_path,
        {"model": model},
        errors.LeafNameError,
        *("held/a/b/1", "contains itself"),
    )


# ---- metadata and metrics -----------------------------------------------------------


def holds_itself():
    held = {}
    held["again"] = held
    return held


@pytest.mark.parametrize(
    ("value", "word"),
    [
        (object(), "builtins.object"),
        (np.ones(2), "numpy.ndarray"),
        ({1: 2}, "the key 1"),
        ({"b": [{2}]}, "['b'][0]"),
        (10**5000, "bits"),
        (nested(65), "64 deep"),
        (nested(100_000), "64 deep"),
        (holds_itself(), "contains itself"),
        ("\ud83d\ude00", "surrogate pair"),
        ("x" * MIB, "1048576"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_rejects_metadata_without_exact_round_trip(tmp_path, monkeypatch, value, word):
    seams.replace(monkeypatch, "orbax_json.max_bytes", MIB)
    for where in (tmp_path / "c", "memory://test/limits"):
        with pytest.raises(errors.OptionError) as info:
            flaxckpt.save_async(where, {"a": 1}, metadata={"key": value})
        assert word in str(info.value)
        assert "metadata['key']" in str(info.value) or isinstance(value, str)
    run, staging = tmp_path / "run", tmp_path / "staging"
    with (
        flaxckpt.Checkpointer(run, staging=staging) as checkpointer,
        pytest.raises(errors.OptionError, match="metadata"),
    ):
        checkpointer.save(1, {"a": 1}, metadata={"key": value})
    with pytest.raises(errors.OptionError, match="metadata"):
        flaxckpt.Checkpointer(tmp_path / "run", metadata={"key": value})


def test_ignores_changes_after_call(tmp_path):
    inner = {"lr": 0.1}
    metadata, metrics = {"run": inner, "tags": ["a"]}, {"loss": np.ones(())}
    state = {
        "n": [1, 2],
        "m": {"x": 1, "y": 2},
        "w": np.ones(3),
        "r": Record(np.ones(2), ["s"]),
    }
    changes = [transforms.drop("m/y")]
    with flaxckpt.Checkpointer(tmp_path, transforms=changes) as checkpointer:
        handle = checkpointer.save(1, state, metrics=metrics, metadata=metadata)
        inner["lr"], metadata["more"] = 0.2, object()
        metadata["tags"].append("b")
        metrics["loss"][...] = 7
        state["n"].append(3)
        state["w"][:] = 9
        state["r"].text.append("t")
        changes.clear()
        handle.wait()
        found = checkpointer.metadata(1)
        assert found.custom == {"run": {"lr": 0.1}, "tags": ["a"]}
        assert found.metrics == {"loss": 1.0}
        assert len(found.transforms) == 1
        loaded = flaxckpt.load(tmp_path, step=1, types=[Record])
    assert loaded["n"] == [1, 2]
    assert loaded["m"] == {"x": 1}
    assert loaded["w"].tolist() == [1, 1, 1]
    assert loaded["r"].text == ("s",)


@pytest.mark.parametrize(
    ("metrics", "word"),
    [
        ({1: 0.5}, "must be str"),
        ({"a": {"b": 1}, "a/b": 2}, "two metrics are named 'a/b'"),
        (holds_itself(), "contain themselves"),
        ({"\ud83d\ude00": 1}, "surrogate pair"),
        ({"x" * MIB: 1}, "1048576"),
    ],
    ids=["int", "twice", "cycle", "surrogates", "long"],
)
def test_rejects_metrics_without_exact_round_trip(tmp_path, monkeypatch, metrics, word):
    seams.replace(monkeypatch, "orbax_json.max_bytes", MIB)
    with flaxckpt.Checkpointer(tmp_path) as checkpointer:
        with pytest.raises(errors.OptionError, match=word):
            checkpointer.save(1, {"a": 1}, metrics=metrics)
        checkpointer.save(1, {"a": 1}, metrics={"a": 1}).wait()
        with pytest.raises(errors.OptionError, match=word):
            checkpointer.add_metrics(1, metrics)
        assert checkpointer.metadata(1).metrics == {"a": 1.0}


def test_rejects_metrics_growing_too_large(tmp_path, monkeypatch):
    seams.replace(monkeypatch, "orbax_json.max_bytes", MIB)
    large = {name * (MIB // 3 * 2): 1.0 for name in "xy"}
    with flaxckpt.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"a": 1}, metrics=dict([large.popitem()])).wait()
        with pytest.raises(errors.SaveFailedError, match="1048576"):
            checkpointer.add_metrics(1, large)
        assert len(checkpointer.metadata(1).metrics) == 1


# ---- datasets and other formats -----------------------------------------------------


class Iterator:
    """An iterator with a state that a test gives it."""

    def __init__(self, state):
        self.state = state

    def __iter__(self):
        return self

    def __next__(self):
        return 0

    def get_state(self):
        return self.state

    def set_state(self, state):
        self.state = state


@pytest.mark.parametrize(
    ("state", "word"),
    [
        ({"buffer": "x" * MIB}, "1048576"),
        ({"seen": list(range(1002))}, "too many values"),
        (nested(65), "64 deep"),
        ({"text": "\ud83d\ude00"}, "surrogate pair"),
        (10**5000, "4300"),
    ],
    ids=["bytes", "values", "depth", "surrogates", "digits"],
)
def test_rejects_unreadable_dataset_states(tmp_path, monkeypatch, state, word):
    seams.replace(monkeypatch, "json_codec.max_state_bytes", MIB)
    seams.replace(monkeypatch, "json_limits.max_values", 1000)
    with flaxckpt.Checkpointer(tmp_path) as checkpointer:
        with pytest.raises(errors.DatasetStateError, match=word):
            checkpointer.save(1, {"a": 1}, dataset=Iterator(state))
        assert checkpointer.steps() == []


def test_nested_dataset_states_round_trip(tmp_path):
    state = {"parent": nested(60, {1: (2, b"3")})}
    with flaxckpt.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"a": 1}, dataset=Iterator(state)).wait()
        fresh = Iterator(None)
        checkpointer.restore({"a": 0}, dataset=fresh)
    assert fresh.state == state


@pytest.mark.parametrize("name", ["out.msgpack", "out.safetensors", "out"])
def test_convert_removes_unreadable_result(tmp_path, monkeypatch, name):
    flaxckpt.save(tmp_path / "c", {"a": np.ones(2), "text": "x" * 1000})

    def refuse(*_):
        raise errors.DamagedCheckpointError("more than 64 MiB of text")

    read_stored = seams.current("locate.read_stored")
    seams.replace(
        monkeypatch,
        "locate.read_stored",
        lambda path, step: read_stored(path, step) if path.name == "c" else refuse(),
    )
    with pytest.raises(errors.SaveFailedError, match="removed: more than 64 MiB"):
        flaxckpt.convert(tmp_path / "c", tmp_path / name)
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


def test_rejects_oversized_safetensors_headers(tmp_path, monkeypatch):
    seams.replace(monkeypatch, "safetensors.max_header_bytes", MIB)
    flaxckpt.save(tmp_path / "c", {"a": np.ones(2), "text": '"' * (MIB // 2)})
    with pytest.raises(errors.OptionError, match="1048576"):
        flaxckpt.convert(tmp_path / "c", tmp_path / "out.safetensors")
    assert [path.name for path in tmp_path.iterdir()] == ["c"]
