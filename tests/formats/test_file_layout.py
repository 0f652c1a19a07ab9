"""Files put together of given bytes and of arrays', in any order."""

import os

from hypothesis import given
from hypothesis import strategies as st

from flaxckpt._formats import file_layout

parts = st.one_of(
    st.binary(max_size=9).map(lambda content: ("given", content)),
    st.tuples(st.sampled_from(["a", "b/c"]), st.binary(max_size=20)),
)


@given(st.lists(parts, max_size=8), st.integers(1, 7), st.randoms())
def test_writes_pieces_in_any_order(tmp_path_factory, parts, step, random):
    layout = file_layout.FileLayout("file")
    arrays = {}
    for name, content in parts:
        if name == "given":
            layout.add(content)
        else:
            start = len(arrays.get(name, b""))
            arrays[name] = arrays.get(name, b"") + content
            layout.add_values(name, start, start + len(content))
    whole = b"".join(content for _, content in parts)
    assert layout.size == len(whole)
    path = tmp_path_factory.mktemp("runs") / layout.name
    path.write_bytes(b"\xff" * layout.size)
    pieces = [
        (name, start, content[start : start + step])
        for name, content in arrays.items()
        for start in range(0, len(content), step)
    ]
    random.shuffle(pieces)
    descriptor = os.open(path, os.O_WRONLY)
    for name, start, content in pieces:
        runs = layout.runs[name]
        file_layout.write_values(descriptor, runs, start, memoryview(content))
    file_layout.write_literals(descriptor, layout)
    os.close(descriptor)
    assert path.read_bytes() == whole
