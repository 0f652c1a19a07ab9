"""Pure functions that write and parse JSON, within limits; the text is not trusted."""

from __future__ import annotations

import json
import operator
import re
from collections.abc import Iterable, Mapping
from typing import Any

from flaxckpt import _state, _storage, _util, errors
from flaxckpt._types import JSON

MANIFEST = _storage.transaction.MANIFEST
MAX_BYTES = 64 * 2**20
"""Largest metadata file that is read; 100,000 leaves take about 20 MB."""

UNSAFE = re.compile(r"\0|\\|^/|//|(?:^|/)\.{1,2}(?:/|$)")
"""Parts of the name of a file or an array that could lead out of a directory."""


to_text = json.JSONEncoder(separators=(",", ":")).encode
"""Returns compact JSON, with NaN and infinities as in Python and Orbax."""


def dumps(data: JSON) -> bytes:
    return to_text(data).encode()


def strings(values: Mapping[str, str]) -> bytes:
    """Returns the content of `_strings.json` for a map of param name -> string."""
    rows = ((name.split("/"), value) for name, value in values.items())
    return dumps(_state.tree.nest_values(rows))


def parse(content: bytes, path: object) -> JSON:
    """Parses JSON of any type; raises DamagedCheckpointError for anything else."""
    try:
        _util.json_limits.check(content)
        data: JSON = json.loads(content.decode())
    except (ValueError, RecursionError) as error:
        raise errors.DamagedCheckpointError(
            f"{path} is not valid JSON ({errors.one_line(error, 100)}); restore"
            " another step"
        ) from None
    return data


def loads(content: bytes, path: object) -> dict[str, Any]:
    """Parses a JSON object; raises DamagedCheckpointError for anything else."""
    data = parse(content, path)
    if not isinstance(data, dict):
        raise errors.DamagedCheckpointError(
            f"{path}: wanted a JSON object, found a {type(data).__name__}; restore"
            " another step"
        )
    return data


def check_size(content: bytes) -> None:
    """Raises ValueError if JSON exceeds the limits of our readers."""
    if len(content) > MAX_BYTES:
        raise ValueError(
            f"it has {len(content)} bytes; readers accept at most {MAX_BYTES}"
        )
    _util.json_limits.check(content)


def param_name(keys: Iterable[_state.tree.Key]) -> str:
    """Returns Orbax's name of a leaf, the keys joined by dots."""
    return ".".join(map(str, map(_NAME, keys)))


_NAME = operator.attrgetter("name")
