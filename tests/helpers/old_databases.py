"""Databases as releases before format version 3 wrote them: all by TensorStore."""

import hashlib
import json
import shutil

import tensorstore as ts

from flaxckpt._arrays import write as arrays_write


def write(root, arrays, *, ocdbt, **options):
    """Writes arrays as `_arrays.write.write`, and the tree of a database."""
    written = arrays_write.write(root, arrays, ocdbt=ocdbt, **options)
    if ocdbt:
        arrays_write.write_tree(root, written.values)
    return written


def make_old(checkpoint, items=("state",), *, digested=False):
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
                content = hashlib.sha256(file.read_bytes()).hexdigest()
                name = file.relative_to(checkpoint).as_posix()
                digests[name] = f"sha256:{content}"
    if digested:
        manifest.pop("checksums", None)
    manifest.pop("segments", None)
    rewrite_manifest(checkpoint, manifest)


def rewrite_manifest(checkpoint, manifest):
    """Replaces the manifest of a checkpoint, and its digest."""
    text = json.dumps(manifest, separators=(",", ":")).encode()
    (checkpoint / "flaxckpt.json").write_bytes(text)
    digest = f"sha256:{hashlib.sha256(text).hexdigest()}"
    seal = json.dumps({"flaxckpt.json": digest}, separators=(",", ":"))
    (checkpoint / "commit_success.txt").write_text(seal)


def _open(root):
    base = {"driver": "file", "path": f"{root}/"}
    return ts.KvStore.open({"driver": "ocdbt", "base": base}).result()


def _read(root):
    store = _open(root)
    return {key: bytes(store[key]) for key in store.list().result()}
