"""Names of arrays in files without containers, such as `layers.0.weight`."""

from __future__ import annotations

from collections.abc import Iterable

from flaxckpt import _state


def split(names: Iterable[str], separator: str) -> dict[str, list[str]] | None:
    """Returns name -> parts of the name, split at `separator`.

    Returns:
        The parts; None if names must stay whole, because one name continues another
        after a separator, or has too many parts.
    """
    parts_of = {name: name.split(separator) for name in names}
    inner = {
        separator.join(parts[:n])
        for parts in parts_of.values()
        for n in range(1, len(parts))
    }
    deepest = _state.tree.MAX_DEPTH // 2
    is_nested = inner.isdisjoint(parts_of) and all(
        len(parts) <= deepest for parts in parts_of.values()
    )
    return parts_of if is_nested else None
