"""Makes the files of a checkpoint: Orbax's own, and our manifest."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from flaxckpt import _arrays, _storage, errors
from flaxckpt._formats import (
    items,
    native_checksums,
    native_manifest,
    native_metadata,
    orbax_files,
    orbax_json,
)
from flaxckpt._formats.items import METRICS
from flaxckpt._formats.native_manifest import Manifest
from flaxckpt._formats.orbax_files import StepMetadata
from flaxckpt._storage.transaction import MARKER
from flaxckpt._types import JSON, LeafPath


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """Contents of a checkpoint except the arrays.

    Attributes:
        manifest: The manifest, without what is known only when all files exist.
        names: Leaf path -> Orbax's name of the leaf in its item.
        dataset: File name -> content of the dataset iterator's state.
        created: Time of the start of the save, in seconds since 1970.
        is_item: Whether this is an item of a step that another program commits: without
            the files of a step.
    """

    manifest: Manifest
    names: Mapping[LeafPath, str]
    segment_bytes: int
    strings: Mapping[str, str] = dataclasses.field(default_factory=dict)
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)
    custom: Mapping[str, JSON] = dataclasses.field(default_factory=dict)
    dataset: Mapping[str, bytes] = dataclasses.field(default_factory=dict)
    json: Mapping[str, JSON] = dataclasses.field(default_factory=dict)
    created: float = 0.0
    is_item: bool = False


def make_files(contents: Contents) -> dict[str, bytes]:
    """Returns path -> content of the files that are neither arrays nor of `seal`.

    Raises SaveFailedError if `read` would not accept a file.
    """
    files: dict[str, bytes] = {}
    manifest = contents.manifest
    if not contents.is_item:
        files[items.CHECKPOINT] = _checkpoint_metadata(contents)
    for item, leaves in manifest.parts.items():
        root = items.prefix(item)
        tree = orbax_files.tree_files(
            [
                (info, contents.names[info.path])
                for info in manifest.items.below(leaves)
            ],
            zarr_version=manifest.zarr_version,
        )
        names = (items.TREE, items.SHARDING, items.ARRAYS)
        files |= {f"{root}{n}": c for n, c in zip(names, tree, strict=True)}
        strings = {
            contents.names[info.path]: contents.strings[info.path]
            for info in leaves
            if info.kind == "string"
        }
        if strings:
            content = orbax_json.strings(strings)
            files[f"{root}{items.STRINGS}"] = content
            with _trial_parse(f"{root}{items.STRINGS}") as parse:
                data = parse(content)
                for leaf in strings:
                    orbax_files.string_at(data, leaf)
    for name, content in contents.dataset.items():
        files[f"{manifest.items.dataset}/{name}"] = content
    for item, value in contents.json.items():
        files[f"{item}/{items.JSON_ITEM}"] = orbax_json.dumps(value)
    if contents.metrics:
        metrics = orbax_json.dumps(dict(contents.metrics))
        files[f"{METRICS}/{METRICS}"] = metrics
        files[items.METRICS_DIGESTS] = native_metadata.metrics_digests(
            metrics, step=manifest.step
        )
    for name in (items.CHECKPOINT, f"{METRICS}/{METRICS}"):
        if name in files:
            with _trial_parse(name) as parse:
                parse(files[name])
    return files


@contextlib.contextmanager
def _trial_parse(name: str) -> Iterator[Callable[[bytes], dict[str, Any]]]:
    """Yields the parser of readers; an error in the block becomes SaveFailedError."""

    def parse(content: bytes) -> dict[str, Any]:
        orbax_json.check_size(content)
        data: dict[str, Any] = json.loads(content)
        return data

    try:
        yield parse
    except (
        *(ValueError, TypeError, KeyError, AttributeError, RecursionError),
        errors.DamagedCheckpointError,
    ) as error:
        raise errors.SaveFailedError(
            f"readers would refuse {name} with this content:"
            f" {errors.printable(errors.one_line(error))}\n"
            "Nothing is saved, and earlier checkpoints are unchanged; leave out or"
            " shorten the value at fault, or save several checkpoints."
        ) from error


def seal(
    contents: Contents,
    files: Mapping[str, bytes],
    root: Path,
    written: Mapping[str, _arrays.written.Written] | None,
    digests: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, bytes]:
    """Returns the last files: indexes of databases, the manifest, and its digest.

    The digest is in the commit marker or, in an item, in `flaxckpt.digest`. The
    manifest has the digests of all files except the metrics, which may be replaced
    later; for zarr 2, whose chunks have no checksums, of all array files below `root`,
    too. `written` is item -> what all processes have written, or None for a trial.
    Raises SaveFailedError if `read` would not accept it.
    """
    recorded = {
        name: _storage.files.digest(content)
        for name, content in files.items()
        if not name.startswith(METRICS)
    }
    recorded |= digests
    last: dict[str, bytes] = {}
    sizes: dict[str, int] = {}
    for item, arrays in (written or {}).items():
        start = items.prefix(item)
        index = _arrays.write.make_index(arrays.values)
        sizes |= {f"{start}{name}": size for name, size in index.sizes.items()}
        last |= {f"{start}{name}": content for name, content in index.files.items()}
    recorded |= {name: _storage.files.digest(content) for name, content in last.items()}
    if contents.manifest.zarr_version == 2:
        recorded |= _digests_of_files(root, sizes)
    with _trial_parse(orbax_json.MANIFEST) as parse:
        manifest = dataclasses.replace(
            contents.manifest,
            json=tuple(contents.json),
            has_metrics=bool(contents.metrics),
            digests=recorded,
            files=sizes,
            checksums=native_checksums.of_written(
                contents.manifest, contents.names, written or {}, contents.segment_bytes
            ),
        )
        text = orbax_json.dumps(manifest.to_json())
        native_manifest.check_readable(parse(text), manifest.infos)
    last[orbax_json.MANIFEST] = text
    last[seal_name(recorded)] = commit_marker(text)
    return last


def _digests_of_files(root: Path, names: Iterable[str]) -> dict[str, str]:
    return {
        name: digest
        for name in names
        if (digest := _storage.of(root).digest_file(root / name, max_bytes=sys.maxsize))
    }


def seal_name(digests: Mapping[str, str]) -> str:
    return MARKER if items.CHECKPOINT in digests else items.SEAL


def commit_marker(manifest: bytes) -> bytes:
    """Returns the content of `commit_success.txt`, and of `flaxckpt.digest`."""
    return orbax_json.dumps({orbax_json.MANIFEST: _storage.files.digest(manifest)})


def _checkpoint_metadata(contents: Contents) -> bytes:
    handlers: dict[str, JSON] = dict.fromkeys(
        contents.manifest.items.trees, orbax_files.STATE_HANDLER
    )
    if contents.metrics:
        handlers[METRICS] = orbax_files.JSON_HANDLER
    if contents.dataset:
        handlers[contents.manifest.items.dataset] = orbax_files.JSON_HANDLER
    handlers |= dict.fromkeys(contents.json, orbax_files.JSON_HANDLER)
    metadata = StepMetadata(handlers, contents.created, custom=contents.custom)
    return orbax_json.dumps(metadata.to_json())
