"""What databases hold, seen from outside of all simulated processes."""

import functools
from collections.abc import Callable
from typing import Any

from tests.helpers import chunks


def read_token(read: Callable[[str], bytes], name: str) -> int:
    """Returns the number of a save, which is the value of its array `name`.

    Args:
        read: Returns the content of a file of the database.
        name: The array, of one chunk.

    Raises:
        ValueError: The database is damaged, or lacks the array.
    """
    place = _read_index(*map(read, chunks.INDEX)).get(f"{name}/c.0")
    if not isinstance(place, chunks.Place):
        raise ValueError(f"the database has no chunk of {name}")
    content = read(place.file)[place.offset : place.offset + place.size]
    return int.from_bytes(content[:8], "little")


@functools.lru_cache
def _read_index(manifest: bytes, tree: bytes) -> dict[str, Any]:
    return chunks.read_index(manifest, tree)
