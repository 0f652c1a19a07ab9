"""Checkpoints as releases before format version 3 wrote them.

Databases were written by TensorStore; arrays could be directories of chunk files.
"""

import hashlib
import json
import shutil

import tensorstore as ts


def open_database(root):
    """Opens a database by TensorStore."""
    return ts.KvStore.open({"driver": "ocdbt", "base": f"file://{root}/"}).result()


def make_databases(checkpoint, items=("state",), *, digested=False):
    """Makes a checkpoint's databases as before version 3.

    Args:
        checkpoint: A checkpoint on a disk, with databases.
        items: Its items with arrays.
        digested: Whether the manifest has the digests of their files, as for small
            databases.
    """
    manifest = json.loads((checkpoint / "flaxckpt.json").read_text())
    del manifest["files"]
    manifest["version"] = 1 if "items" not in manifest else 2
    digests = manifest["digests"]
    for item in items:
        root = checkpoint / item
        for name in ("d/tree", "manifest.ocdbt"):
            del digests[f"{item}/{name}"]
        old = checkpoint / f"{item}.old"
        with ts.Transaction() as transaction:
            new = _open(old).with_transaction(transaction)
            for key, value in _read(root).items():
                new[key] = value
        (root / "manifest.ocdbt").unlink()
        shutil.rmtree(root / "d")
        for name in ("manifest.ocdbt", "d"):
            (old / name).rename(root / name)
        shutil.rmtree(old)
        if digested:
            for file in (root / "manifest.ocdbt", *(root / "d").iterdir()):
                name = file.relative_to(checkpoint).as_posix()
                digests[name] = _digest(file.read_bytes())
    if digested:
        manifest.pop("checksums", None)
    manifest.pop("segments", None)
    rewrite_manifest(checkpoint, manifest)


def make_directories(checkpoint, items=("state",)):
    """Makes a checkpoint's databases directories of chunk files, as before version 3.

    Args:
        checkpoint: A checkpoint on a disk, with databases.
        items: Its items with arrays.
    """
    manifest = json.loads((checkpoint / "flaxckpt.json").read_text())
    del manifest["files"]
    manifest["version"] = 1 if "items" not in manifest else 2
    manifest["ocdbt"] = False
    digests = manifest["digests"]
    is_zarr_2 = manifest["encoding"].get("zarr_version") == 2
    for item in items:
        root, prefix = checkpoint / item, f"{item}/" if item else ""
        for name in [name for name in digests if name.startswith(f"{prefix}d/")]:
            del digests[name]
        digests.pop(f"{prefix}manifest.ocdbt", None)
        for name, value in make_files(root).items():
            if is_zarr_2:
                digests[f"{prefix}{name}"] = _digest(value)
        tree = root / "_METADATA"
        content = tree.read_bytes().replace(b'"use_ocdbt":true', b'"use_ocdbt":false')
        tree.write_bytes(content)
        digests[f"{prefix}_METADATA"] = _digest(content)
    rewrite_manifest(checkpoint, manifest)


def make_files(root):
    """Replaces a database by a file for each value; returns name -> content."""
    values = {}
    if (root / "manifest.ocdbt").exists():
        values = {key.decode(): value for key, value in _read(root).items()}
        (root / "manifest.ocdbt").unlink()
    shutil.rmtree(root / "d", ignore_errors=True)
    for name, value in values.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(value)
    return values


def rewrite_manifest(checkpoint, manifest):
    """Replaces the manifest of a checkpoint, and its digest."""
    text = json.dumps(manifest, separators=(",", ":")).encode()
    (checkpoint / "flaxckpt.json").write_bytes(text)
    seal = json.dumps({"flaxckpt.json": _digest(text)}, separators=(",", ":"))
    names = ("flaxckpt.digest", "commit_success.txt")  # the first in items of others
    name = next(name for name in names if (checkpoint / name).exists())
    (checkpoint / name).write_text(seal)


def _digest(content):
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


def _open(root):
    base = {"driver": "file", "path": f"{root}/"}
    return ts.KvStore.open({"driver": "ocdbt", "base": base}).result()


def _read(root):
    store = _open(root)
    return {key: bytes(store[key]) for key in store.list().result()}
