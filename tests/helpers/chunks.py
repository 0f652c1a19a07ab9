"""Stored chunks of arrays, in databases and in directories, to look at and to damage.

A chunk is named as in `w/c.0.0`.
"""

from flaxckpt._arrays import write as arrays_write
from flaxckpt._zarr import ocdbt
from tests.helpers import old_stores


def read_tree(root):
    """Returns the values of a database: key -> bytes, or the place in a file."""
    return {key.decode(): value for key, value in ocdbt.read_tree(root).items()}


def place(root, name):
    """Returns the file of a chunk, and its offset and size in the file.

    Args:
        root: The directory of an item with arrays.
        name: The chunk.
    """
    if not (root / "manifest.ocdbt").exists():
        return root / name, 0, len((root / name).read_bytes())
    found = read_tree(root)[name]
    return root / found.file, found.offset, found.size


def names(root, array):
    """Returns the chunks of an array in a database."""
    return [key for key in sorted(read_tree(root)) if key.startswith(f"{array}/c")]


def read(root, name):
    """Returns the stored bytes of a chunk."""
    file, offset, size = place(root, name)
    return file.read_bytes()[offset : offset + size]


def put(root, name, content):
    """Replaces the stored bytes of a chunk by as many others."""
    file, offset, size = place(root, name)
    assert len(content) == size
    whole = file.read_bytes()
    file.write_bytes(whole[:offset] + content + whole[offset + size :])


def flip(root, name, at=None):
    """Flips a bit of the byte at `at` of a chunk, by default in its middle."""
    content = bytearray(read(root, name))
    content[len(content) // 2 if at is None else at] ^= 1
    put(root, name, content)


def write(root, arrays, *, ocdbt=True, **options):
    """Writes arrays alone: a whole database, or directories as before version 3."""
    written = arrays_write.write(root, arrays, arrays_write.WriteOptions(**options))
    for name, content in arrays_write.make_index(written.values).files.items():
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_bytes(content)
    if not ocdbt:
        old_stores.make_files(root)
    return written
