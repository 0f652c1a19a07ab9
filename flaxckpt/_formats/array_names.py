"""Names of arrays in files without containers, such as `layers.0.weight`."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable
from pathlib import Path

from flaxckpt import _state

_log = logging.getLogger(__name__)


def split(
    names: Iterable[str], separator: str, file: Path
) -> dict[str, tuple[_state.tree.Key, ...]]:
    """Returns name -> its parts as keys; warns, and keeps names whole, if ambiguous."""
    names = list(names)
    is_deep = any(n.count(separator) >= _state.tree.MAX_DEPTH // 2 for n in names)
    parts_of = {name: [name] if is_deep else name.split(separator) for name in names}
    # A name is followed by the names that continue it, if there are any.
    ordered = sorted(parts_of.values())
    if is_deep or any(
        longer[: len(parts)] == parts for parts, longer in itertools.pairwise(ordered)
    ):
        _log.warning(
            "the names of the arrays in %s are not split at %r: one name continues"
            " another after it, or has too many of it",
            file,
            separator,
        )
        parts_of = {name: [name] for name in names}
    return {
        name: tuple([_state.tree.Key(part, "key") for part in parts])
        for name, parts in parts_of.items()
    }
