"""Names of arrays in files without containers, such as `layers.0.weight`."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from flaxckpt import _state


def split(names: Iterable[str], separator: str) -> dict[str, list[str]] | None:
    """Returns name -> parts of the name, split at `separator`.

    None if names must stay whole, because one name continues another after a separator,
    or has too many parts.
    """
    names = list(names)
    if any(name.count(separator) >= _state.tree.MAX_DEPTH // 2 for name in names):
        return None
    parts_of = {name: name.split(separator) for name in names}
    # A name is followed by the names that continue it, if there are any.
    ordered = sorted(parts_of.values())
    is_continued = any(
        longer[: len(parts)] == parts for parts, longer in itertools.pairwise(ordered)
    )
    return None if is_continued else parts_of
