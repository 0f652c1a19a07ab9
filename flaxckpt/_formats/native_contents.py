"""Makes the files of a checkpoint: Orbax's own, and our manifest."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from flaxckpt import _arrays, _state, _storage, _zarr, errors
from flaxckpt._formats import (
    items,
    native_checksums,
    native_manifest,
    native_metadata,
    orbax_files,
    orbax_json,
)
from flaxckpt._formats.items import METRICS, Items
from flaxckpt._formats.reader import Lineage
from flaxckpt._state.leaf import LeafInfo
from flaxckpt._storage.commit_marker import MARKER
from flaxckpt._types import JSON, LeafPath


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """Contents of a checkpoint except the arrays.

    Attributes:
        infos: The leaves, in order.
        structure: The containers.
        encoding: Encoding of the chunks.
        items: The items with the arrays and the dataset.
        step: Step number, or None.
        strings: Leaf path -> value of the string leaves.
        metrics: Metrics of the step.
        custom: The user's metadata.
        dataset: File name -> content of the dataset iterator's state; empty if not
            saved.
        json: JSON item -> content.
        created: Time of the start of the save, in seconds since 1970.
        lineage: Checkpoints that the run started from.
        transforms: The transforms applied to the state, as text.
        is_item: Whether this is an item of a step that another program commits: without
            the files of a step.
    """

    infos: Sequence[LeafInfo]
    structure: _state.tree.Node | LeafPath
    encoding: _zarr.metadata.Encoding
    items: Items = dataclasses.field(default_factory=Items)
    step: int | None = None
    strings: Mapping[str, str] = dataclasses.field(default_factory=dict)
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)
    custom: Mapping[str, JSON] = dataclasses.field(default_factory=dict)
    dataset: Mapping[str, bytes] = dataclasses.field(default_factory=dict)
    json: Mapping[str, JSON] = dataclasses.field(default_factory=dict)
    created: float = 0.0
    lineage: Sequence[Lineage] = ()
    transforms: Sequence[str] = ()
    is_item: bool = False

    def segment_bytes(self) -> int | None:
        """Returns the bytes of the segments of chunks; None for no segments."""
        return native_checksums.choose_bytes(self.infos, self.encoding)


def make_files(contents: Contents) -> dict[str, bytes]:
    """Returns the files of a checkpoint: relative path -> content.

    Without the arrays, and without the files that `seal` makes once all others exist.

    Raises:
        SaveFailedError: `read` would not accept a file.
    """
    files: dict[str, bytes] = {}
    if not contents.is_item:
        files[items.CHECKPOINT] = _checkpoint_metadata(contents)
    for item, leaves in contents.items.split(contents.infos).items():
        infos = contents.items.below(leaves)
        root = items.prefix(item)
        files |= {
            f"{root}{items.TREE}": orbax_files.tree_metadata(
                infos, zarr_version=contents.encoding.version
            ),
            f"{root}{items.SHARDING}": orbax_files.shardings(infos),
            f"{root}{items.ARRAYS}": orbax_files.array_metadatas(infos),
        }
        strings = {
            orbax_json.param_name(info.keys): contents.strings[info.path]
            for info in infos
            if info.kind == "string"
        }
        if strings:
            content = orbax_files.strings(strings)
            files[f"{root}{items.STRINGS}"] = content
            with _trial_parse(f"{root}{items.STRINGS}") as parse:
                data = parse(content)
                for leaf in strings:
                    orbax_json.string_at(data, leaf)
    for name, content in contents.dataset.items():
        files[f"{contents.items.dataset}/{name}"] = content
    for item, value in contents.json.items():
        files[f"{item}/{items.JSON_ITEM}"] = orbax_json.dumps(value)
    if contents.metrics:
        metrics = orbax_json.dumps(dict(contents.metrics))
        files[f"{METRICS}/{METRICS}"] = metrics
        files[items.METRICS_DIGESTS] = native_metadata.metrics_digests(
            metrics, step=contents.step
        )
    for name in (items.CHECKPOINT, f"{METRICS}/{METRICS}"):
        if name in files:
            with _trial_parse(name) as parse:
                parse(files[name])
    return files


@contextlib.contextmanager
def _trial_parse(name: str) -> Iterator[Callable[[bytes], dict[str, Any]]]:
    """Context with a function that parses the file `name` as readers do.

    Raises:
        SaveFailedError: The block failed; explains why readers cannot read the file.
    """

    def parse(content: bytes) -> dict[str, Any]:
        orbax_json.check_size(content)
        return orbax_json.loads(content, name)

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
    written: Mapping[str, _arrays.write.Written] | None,
    digests: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, bytes]:
    """Returns the last files: indexes of databases, the manifest, and its digest.

    The digest is in the commit marker or, in an item, in `flaxckpt.digest`.

    The manifest has the digests of all `files` except the metrics, which may be
    replaced later, and of the indexes of databases. For zarr 2, whose chunks have no
    checksums, it has the digests of all array files.

    Args:
        contents: Contents of the checkpoint.
        files: Result of `make_files`.
        root: The directory with the arrays.
        written: Item -> what all processes have written to its database. None for a
            trial without arrays.
        digests: Digests of files written by other processes: name -> digest.

    Returns:
        Relative path -> content.

    Raises:
        SaveFailedError: `read` would not accept the manifest.
    """
    recorded = {
        name: _storage.files.digest(content)
        for name, content in files.items()
        if not name.startswith(METRICS)
    }
    recorded |= digests
    last: dict[str, bytes] = {}
    sizes: dict[str, int] = {}
    checksums: _arrays.write.Checksums = {}
    for item, arrays in (written or {}).items():
        start = items.prefix(item)
        checksums |= {
            f"{start}{name}" if name else item: chunks  # all of a state of one array
            for name, chunks in arrays.checksums.items()
        }
        index = _arrays.write.make_index(arrays.values)
        sizes |= {f"{start}{name}": size for name, size in index.sizes.items()}
        last |= {f"{start}{name}": content for name, content in index.files.items()}
    recorded |= {name: _storage.files.digest(content) for name, content in last.items()}
    if contents.encoding.version == 2:
        recorded |= _digests_of_files(root, sizes)
    if not contents.encoding.checksum:
        checksums = {}
    with _trial_parse(orbax_json.MANIFEST) as parse:
        manifest = _manifest_text(contents, recorded, sizes, checksums)
        native_manifest.check_readable(parse(manifest), contents.infos)
    last[orbax_json.MANIFEST] = manifest
    last[seal_name(recorded)] = commit_marker(manifest)
    return last


def _digests_of_files(root: Path, names: Iterable[str]) -> dict[str, str]:
    """Returns the digests of files under `root`: name -> digest."""
    return {
        name: digest
        for name in names
        if (digest := _storage.of(root).digest_file(root / name, max_bytes=sys.maxsize))
    }


def seal_name(digests: Mapping[str, str]) -> str:
    """Returns the name of the file with the digest of the manifest.

    Args:
        digests: The digests in the manifest: file name -> digest.
    """
    return MARKER if items.CHECKPOINT in digests else items.SEAL


def commit_marker(manifest: bytes) -> bytes:
    """Returns the content of `commit_success.txt`, and of `flaxckpt.digest`."""
    return orbax_json.dumps({orbax_json.MANIFEST: _storage.files.digest(manifest)})


def _checkpoint_metadata(contents: Contents) -> bytes:
    handlers: dict[str, JSON] = dict.fromkeys(
        contents.items.trees, orbax_files.STATE_HANDLER
    )
    if contents.metrics:
        handlers[METRICS] = orbax_files.JSON_HANDLER
    if contents.dataset:
        handlers[contents.items.dataset] = orbax_files.JSON_HANDLER
    handlers |= dict.fromkeys(contents.json, orbax_files.JSON_HANDLER)
    return orbax_json.dumps(
        {
            "item_handlers": handlers,
            "metrics": {},
            "performance_metrics": {},
            "init_timestamp_nsecs": int(contents.created * 1e9),
            "commit_timestamp_nsecs": time.time_ns(),
            "custom_metadata": dict(contents.custom),
        }
    )


def _manifest_text(
    contents: Contents,
    digests: Mapping[str, str],
    sizes: Mapping[str, int] = MappingProxyType({}),
    checksums: _arrays.write.Checksums | None = None,
) -> bytes:
    optional: dict[str, JSON] = {"files": dict(sizes)}
    if checksums:
        optional |= native_checksums.rows(
            contents.infos,
            contents.items,
            contents.encoding,
            contents.segment_bytes(),
            checksums,
        )
    if contents.lineage:
        optional["lineage"] = [origin._asdict() for origin in contents.lineage]
    if contents.transforms:
        optional["transforms"] = list(contents.transforms)
    if contents.metrics:
        optional["metrics"] = True
    if contents.items != Items():
        optional["items"] = native_manifest.items_row(contents.items)
    if contents.json:
        optional["json"] = list(contents.json)
    return orbax_json.dumps(
        {
            "format": "flaxckpt",
            "version": native_manifest.VERSIONS[-1],
            "step": contents.step,
            "versions": native_manifest.versions(),
            "ocdbt": True,
            "encoding": native_manifest.encoding_row(contents.encoding),
            "leaves": [native_manifest.leaf_row(info) for info in contents.infos],
            "structure": _state.treedef.to_json(contents.structure),
            "digests": digests,
            **optional,
        }
    )
