"""Stored chunks of arrays, in databases and in directories, to look at and to damage.

A chunk is named as in `w/c.0.0`.
"""

from typing import NamedTuple
from urllib import parse

import tensorstore as ts

INDEX = ("manifest.ocdbt", "d/tree")
"""The files of a database that has no more nodes than a save writes."""


class Place(NamedTuple):
    """Where a value of a database is in a file."""

    file: str
    offset: int
    size: int


def read_tree(root):
    """Returns the values of a database: key -> bytes, or the place in a file."""
    if hasattr(root, "store"):
        index = ((root / name).read_bytes() for name in INDEX)
        return read_index(*index)
    return _read(ts.KvStore.open({"driver": "file", "path": f"{root}/"}).result())


def read_index(manifest, tree):
    """Returns the values of a database from the contents of its `INDEX`."""
    store = ts.KvStore.open({"driver": "memory"}, context=ts.Context()).result()
    for name, content in zip(INDEX, (manifest, tree), strict=True):
        store[name] = content
    return _read(store)


def _read(store):
    version = ts.ocdbt.dump(store, None).result()["versions"][-1]
    return _read_node(store, version["root"].get("location"))


def _read_node(store, location, prefix=b""):
    """Returns the values of a node of the tree, and of all nodes below."""
    found = {}
    entries = ts.ocdbt.dump(store, location).result()["entries"] if location else ()
    for entry in entries:
        key = prefix + entry["key"]
        if "location" in entry:
            below = prefix + entry["subtree_common_prefix"]
            found |= _read_node(store, entry["location"], below)
        elif "indirect_value" in entry:
            file, offset, size = entry["indirect_value"].rsplit(":", 2)
            file = parse.unquote("".join(file.split(":")[1:]))
            found[key.decode()] = Place(file, int(offset), int(size))
        else:
            found[key.decode()] = bytes(entry["inline_value"])
    return found


def place(root, name):
    """Returns the file of a chunk, and its offset and size in the file.

    Args:
        root: The directory of an item with arrays.
        name: The chunk.
    """
    if not (root / "manifest.ocdbt").exists():
        return root / name, 0, len((root / name).read_bytes())
    found = read_tree(root)[name]
    return root / found.file, found.offset, found.size


def names(root, array):
    """Returns the chunks of an array in a database."""
    return [key for key in sorted(read_tree(root)) if key.startswith(f"{array}/c")]


def read(root, name):
    """Returns the stored bytes of a chunk."""
    file, offset, size = place(root, name)
    return file.read_bytes()[offset : offset + size]


def put(root, name, content):
    """Replaces the stored bytes of a chunk by as many others."""
    file, offset, size = place(root, name)
    assert len(content) == size
    whole = file.read_bytes()
    file.write_bytes(whole[:offset] + content + whole[offset + size :])


def flip(root, name, at=None):
    """Flips a bit of the byte at `at` of a chunk, by default in its middle."""
    content = bytearray(read(root, name))
    content[len(content) // 2 if at is None else at] ^= 1
    put(root, name, content)
