"""States come back with the values and the types that they had."""

import json
import math

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import flaxckpt
from flaxckpt import datasets, errors
from tests.helpers import seams

FILE = "process_0-of-1.json"
TAGS = [
    *("__bytes__", "__dict__", "__ndarray__", "__scalar__", "__tensor__", "__tuple__")
]

arrays = st.builds(
    lambda data, dtype, order: np.array(data).astype(
        np.dtype(dtype).newbyteorder(order)
    ),
    st.lists(st.integers(0, 100), max_size=4),
    st.sampled_from(["int32", "float64", "uint8", "bool", "complex64"]),
    st.sampled_from("<>"),
)
scalars = st.builds(
    lambda value, dtype: np.dtype(dtype).type(value),
    st.integers(0, 100),
    st.sampled_from(
        ["int8", "uint64", "float32", "float64", "bool", ml_dtypes.bfloat16]
    ),
)
hashable = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary()
    | st.sampled_from(TAGS),
    lambda inner: st.tuples(inner, inner),
    max_leaves=3,
)
states = st.recursive(
    hashable | st.floats() | arrays | scalars,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(hashable, inner, max_size=3)
        | st.dictionaries(st.sampled_from(TAGS), inner, min_size=1, max_size=1)
    ),
    max_leaves=12,
)


def assert_same(found, wanted):
    """Equal in value and type, all the way down, and in the order of dicts."""
    assert type(found) is type(wanted)
    if isinstance(wanted, dict):
        assert len(found) == len(wanted)
        for one, other in zip(found.items(), wanted.items(), strict=True):
            assert_same(one, other)
    elif isinstance(wanted, list | tuple):
        assert len(found) == len(wanted)
        for one, other in zip(found, wanted, strict=True):
            assert_same(one, other)
    elif isinstance(wanted, np.ndarray):
        assert found.dtype == wanted.dtype
        assert found.shape == wanted.shape
        assert found.tobytes() == wanted.tobytes()
    elif isinstance(wanted, np.generic):
        assert found.tobytes() == wanted.tobytes()
    elif isinstance(wanted, float) and math.isnan(wanted):
        assert math.isnan(found)
    else:
        assert found == wanted


class Holder:
    """Its state is whatever it was given."""

    def __init__(self, state=None):
        self.state = state

    def get_state(self):
        return self.state

    def set_state(self, state):
        self.state = state


def set_and_get(files):
    holder = Holder()
    datasets.set_state(holder, files, path="run/1")
    return holder.state


def written(state):
    """Returns the file of a state."""
    return datasets.state_files(Holder(state))[FILE]


def round_trip(state):
    return set_and_get(datasets.state_files(Holder(state)))


@given(states)
def test_state_round_trips(state):
    assert_same(round_trip(state), state)


def test_dicts_resembling_tags_round_trip():
    for state in (
        {"__tuple__": [1]},
        {"__bytes__": "AAAA"},
        {"__dict__": [[1, 2]]},
        {"__dict__": {"__dict__": []}},
        {"__ndarray__": {"dtype": "int8", "shape": [1], "data": "AA=="}},
        {"__tuple__": [1], "n": 2},
    ):
        assert_same(round_trip(state), state)


def test_arrays_of_every_rank_and_size_round_trip():
    for shape in [(), (0,), (3, 0), (2, 3)]:
        for dtype in ["float32", "bool", ml_dtypes.bfloat16, ">i8"]:
            array = np.zeros(shape, dtype)
            assert_same(round_trip(array), array)
    turned = np.arange(6).reshape(2, 3).T
    assert_same(round_trip(turned), turned)


def test_decoded_arrays_are_writable():
    found = round_trip(np.zeros(2))
    found[0] = 1


def test_encodes_plain_states_as_plain_json():
    state = {"next_index": 3, "nested": [{"a": None, "b": "x"}], "empty": {}}
    assert written(state) == json.dumps(state, indent=4).encode()
    state["long"] = list(range(2**15))
    assert written(state) == json.dumps(state).encode()
    assert_same(round_trip(state), state)


def test_error_locates_masked_arrays():
    for masked in (np.ma.array([1, 2], mask=[True, False]), np.ma.masked):
        wanted = r"Masked\w+ at state\['a'\]: wanted"
        with pytest.raises(errors.DatasetStateError, match=wanted):
            datasets.state_files(Holder({"a": masked}))


def test_decodes_version_1_tags():
    """Files of before the codec had a version: three tags, nothing escaped."""
    old = (
        b'{"a": {"__tuple__": [1]}, "b": {"__bytes__": "AAE="}, "c": {"__dict__": []}}'
    )
    wanted = {"a": (1,), "b": b"\x00\x01", "c": {"__dict__": []}}
    files = {FILE: old, "metadata": b'{"is_bytes": false}'}
    assert set_and_get(files) == wanted


def test_ignores_tags_in_foreign_json():
    files = {FILE: b'{"a": {"__tuple__": [1]}}'}
    assert set_and_get(files) == {"a": {"__tuple__": [1]}}


def test_rejects_newer_codec_version():
    files = {FILE: b"{}", "metadata": b'{"codec": 3}'}
    with pytest.raises(errors.DatasetStateError, match="newer flaxckpt"):
        set_and_get(files)


@pytest.mark.parametrize(
    "content",
    [
        b'{"__bytes__": "!"}',
        b'{"__dict__": [1]}',
        b'{"__dict__": [[{}, 1]]}',
        b'{"__ndarray__": {"dtype": "object", "shape": [1], "data": ""}}',
        b'{"__ndarray__": {"dtype": "int8", "shape": [9], "data": "AA=="}}',
        b'{"__ndarray__": {"dtype": "bool", "shape": [1], "data": "Ag=="}}',
        b'{"__tensor__": {"dtype": "save", "shape": [1], "data": "AA=="}}',
        b"[" * 100_000,
        b"[" + b"[]," * 2**22 + b"[]]",
        b"not json",
    ],
    ids=lambda content: content[:40].decode(),
)
def test_rejects_invalid_state_files(content):
    files = {FILE: content, "metadata": b'{"codec": 2, "is_bytes": false}'}
    with pytest.raises(errors.DatasetStateError, match="does not accept the state"):
        set_and_get(files)


@pytest.mark.parametrize(
    ("state", "found"),
    [
        ({"a": [1, {2, 3}]}, r"builtins.set at state\['a'\]\[1\]"),
        ({"a": object()}, "builtins.object"),
        (np.array([object()]), "numpy array of object at state"),
        (np.array(["x"]), "numpy array of <U1"),
        (1j, "builtins.complex"),
        ({"a": lambda: 0}, "function"),
    ],
    ids=["set", "object", "objects", "strings", "complex", "function"],
)
def test_error_locates_unsupported_values(state, found):
    with pytest.raises(errors.DatasetStateError, match=found):
        datasets.state_files(Holder(state))


def test_rejects_state_containing_itself():
    state = []
    state.append(state)
    with pytest.raises(errors.DatasetStateError, match="contains itself"):
        datasets.state_files(Holder(state))


def test_bytes_resembling_tagged_json_round_trip():
    for state in (b'{"__bytes__": "AAAA"}', b'{"n": 1}', b"12", b"\xff", b""):
        assert round_trip(state) == state


@pytest.mark.slow
def test_state_over_64_mib_round_trips_with_one_warning(tmp_path, caplog):
    state = {"buffer": np.arange(52 * 2**20 // 8)}
    holder, fresh = Holder(state), Holder()
    with flaxckpt.Checkpointer(tmp_path) as ckpt:
        for step in (1, 2):
            ckpt.save(step, {"x": 1}, dataset=holder).wait()
            state["step"] = step  # another size
        assert (tmp_path / "1/dataset/process_0-of-1.json").stat().st_size > 64 * 2**20
        ckpt.restore(dataset=fresh)
    assert_same(fresh.state, state | {"step": 1})
    warnings = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert len(warnings) == 1
    assert "shuffle buffer" in warnings[0]


def test_rejects_state_too_large_to_read(monkeypatch):
    seams.replace(monkeypatch, "json_codec.max_state_bytes", 1000)
    datasets.state_files(Holder(b"x" * 500))
    with pytest.raises(errors.DatasetStateError, match="more than 1000"):
        datasets.state_files(Holder(b"x" * 1000))
