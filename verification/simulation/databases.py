"""What databases hold, seen from outside of all simulated processes."""

import functools
from collections.abc import Callable

from flaxckpt._zarr import btree


def read_token(read: Callable[[str], bytes], name: str) -> int:
    """Returns the number of a save, which is the value of its array `name`.

    Args:
        read: Returns the content of a file of the database.
        name: The array, of one chunk.

    Raises:
        ValueError: The database is damaged, or lacks the array.
    """
    root = _root(read("manifest.ocdbt"))
    node = read(root.place.file)
    part = node[root.place.offset : root.place.offset + root.place.size]
    place = _places(part, root.base).get(f"{name}/c.0".encode())
    if not isinstance(place, btree.Place):
        raise ValueError(f"the database has no chunk of {name}")
    content = read(place.file)[place.offset : place.offset + place.size]
    return int.from_bytes(content[:8], "little")


@functools.lru_cache
def _root(manifest: bytes) -> btree.Root:
    root = btree.decode_manifest(btree.unpack_manifest(manifest))
    if root is None or root.height:
        raise ValueError("the database is not a single node")
    return root


@functools.lru_cache
def _places(node: bytes, base: str) -> dict[bytes, btree.Value]:
    return dict(btree.decode_leaf(btree.unpack_node(node), base))
