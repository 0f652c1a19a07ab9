"""What a disk may hold after a power cut, by what was done to it until then.

The strictest model: whatever was not synced may be lost or there, each piece by itself.
A file's bytes are durable when it was synced; a name, when its directory was. Only a
rename is one thing: whole or not at all.
"""

import hashlib
import itertools


class File:
    def __init__(self, content=b""):
        self.content = content  # durable from the beginning
        self.writes = []  # (when, offset, data); None as data cuts the file there
        self.syncs = []


class Directory:
    def __init__(self):
        self.names = {}  # as the program sees them
        self.base = {}
        self.changes = []  # (when, name, what is there or None)


class Disk:
    """A directory, followed through recorded calls."""

    def __init__(self, root):
        self._root = self._load(root)
        self._ends = {}  # call -> when it became durable
        self._now = 0
        self.notes = []  # (when, text)

    def _load(self, path):
        if path.is_file():
            return File(path.read_bytes())
        found = Directory()
        for each in path.iterdir():
            found.names[each.name] = found.base[each.name] = self._load(each)
        return found

    def _at(self, path):
        found = self._root
        for name in [name for name in path.split("/") if name]:
            if not isinstance(found, Directory):
                return None
            found = found.names.get(name)
        return found

    def _set(self, path, what):
        parent, _, name = path.rpartition("/")
        directory = self._at(parent)
        if what is None:
            directory.names.pop(name, None)
        else:
            directory.names[name] = what
        directory.changes.append((self._now, name, what))

    def replay(self, journal):
        """Follows all calls of a journal; returns how many there are."""
        while journal:
            line, _, journal = journal.partition(b"\n")
            call, a, b, offset, size = line.decode().split("\0")
            data, journal = journal[: int(size)], journal[int(size) :]
            self._do(call, a, b, int(offset), data)
            self._now += 1
        return self._now

    def _do(self, call, a, b, offset, data):
        found = None if call == "note" else self._at(a)
        match call:
            case "note":
                self.notes.append((self._now, a))
            case "mkdir":
                self._set(a, Directory())
            case "open" | "create" if found is None:
                if "(deleted)" not in a and "/#" not in a:
                    self._set(a, File())
            case "create" if isinstance(found, File):
                found.writes.append((self._now, 0, None))
            case "write" if isinstance(found, File):
                found.writes.append((self._now, offset, data))
            case "truncate" if isinstance(found, File):
                found.writes.append((self._now, offset, None))
            case "fsync" if found is not None:
                if isinstance(found, File):
                    found.syncs.append(self._now)
                else:
                    for when, _, _ in found.changes:
                        self._ends.setdefault(when, self._now)
            case "rename" if offset == 2:
                other = self._at(b)
                self._set(a, other)
                self._set(b, found)
            case "rename":
                self._set(a, None)
                self._set(b, found)
            case "link":
                self._set(b, found)
            case "unlink" | "rmdir":
                self._set(a, None)

    # ---- after the cut --------------------------------------------------------------

    def states(self, when, chance):
        """What may be there after a cut before call `when`: path -> content or None."""
        yield self._state(when, lambda: False, lambda: False)
        yield self._state(when, lambda: True, lambda: False)
        yield self._state(when, lambda: False, lambda: True)
        for _ in range(2):
            flip = lambda: chance.random() < 0.5  # noqa: E731
            yield self._state(when, flip, flip)

    def _state(self, when, keeps_name, keeps_data):
        decided = {}

        def stays(change):
            if self._ends.get(change, when) < when:
                return True
            return decided.setdefault(change, keeps_name())

        found = {}

        def walk(directory, path):
            done = itertools.takewhile(lambda each: each[0] < when, directory.changes)
            names = directory.base | {
                name: what for at, name, what in done if stays(at)
            }
            for name, what in names.items():
                if isinstance(what, Directory):
                    found[f"{path}{name}"] = None
                    walk(what, f"{path}{name}/")
                elif what is not None:
                    found[f"{path}{name}"] = content(what)

        def content(file):
            data = bytearray(file.content)
            synced = max((at for at in file.syncs if at < when), default=-1)
            for at, offset, written in file.writes:
                if at >= when:
                    break
                if at > synced and not keeps_data():
                    continue
                if written is None:
                    del data[offset:]
                else:
                    data.extend(bytes(max(0, offset - len(data))))
                    data[offset : offset + len(written)] = written
            return bytes(data)

        walk(self._root, "")
        return found


def digest(state):
    """What is equal if two states are."""
    made = hashlib.sha256()
    for path, content in sorted(state.items()):
        made.update(repr((path, content)).encode())
    return made.digest()


def put(state, root):
    """Makes a state true below a new directory."""
    root.mkdir(parents=True)
    for path, content in sorted(state.items()):
        if content is None:
            (root / path).mkdir()
        else:
            (root / path).write_bytes(content)
