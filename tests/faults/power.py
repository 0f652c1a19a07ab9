"""What a disk may hold after a power cut, by what was done to it until then.

The strictest model: whatever was not synced may be lost or there, each piece by itself.
A file's bytes are durable when it was synced; a name, when its directory was. Only a
rename is one thing: whole or not at all.
"""

import functools
import hashlib


class File:
    def __init__(self, content=b""):
        self.content = content  # durable from the beginning
        self.changes = []  # (when, offset, data); None as data cuts the file there
        self._made = {}

    def after(self, applied):
        """The content if these of the changes were done."""
        if applied not in self._made:
            data = bytearray(self.content)
            for when, offset, written in self.changes:
                if when not in applied:
                    continue
                if written is None:
                    del data[offset:]
                else:
                    data.extend(bytes(max(0, offset - len(data))))
                    data[offset : offset + len(written)] = written
            self._made[applied] = bytes(data)
        return self._made[applied]


class Directory:
    def __init__(self):
        self.names = {}  # as the program sees them
        self.base = {}
        self.changes = []  # (when, name, what is there or None)


class Disk:
    """A directory, followed through recorded calls.

    Attributes:
        calls: A line for each call, as it is shown to people.
        notes: Texts between the calls: when, and the text.
    """

    def __init__(self, root):
        self._root = self._load(root)
        self._places = {}  # call -> the file or directory that it changes
        self._ends = {}  # call -> when it became durable
        self._now = 0
        self.calls = []
        self.notes = []

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
        self._change(directory, name, what)

    def _change(self, place, *change):
        place.changes.append((self._now, *change))
        self._places[self._now] = place

    def replay(self, journal):
        """Follows all calls of a journal; returns how many there are."""
        while journal:
            line, _, journal = journal.partition(b"\n")
            call, a, b, offset, size = line.decode().split("\0")
            data, journal = journal[: int(size)], journal[int(size) :]
            self._do(call, a, b, int(offset), data)
            self.calls.append(f"{call} {a} {b}".strip())
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
                self._change(found, 0, None)
            case "write" if isinstance(found, File):
                self._change(found, offset, data)
            case "truncate" if isinstance(found, File):
                self._change(found, offset, None)
            case "fsync" if found is not None:
                for when, *_ in found.changes:
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

    def pending(self, when):
        """The calls that changed something and are not durable before call `when`."""
        return [
            call
            for call in self._places
            if call < when and self._ends.get(call, when) >= when
        ]

    def losses(self, when, chance):
        """What a cut before call `when` may lose, as sets of calls.

        Nothing; all; names only; data only; and two random choices.
        """
        pending = self.pending(when)
        names = self._names(pending)
        found = [(), pending, names, frozenset(pending) - names]
        found += [[call for call in pending if chance.random() < 0.5] for _ in range(2)]
        return [frozenset(lost) for lost in found]

    def all_losses(self, when, chance, is_hidden):
        """As `losses`; and each call by itself, and what was done since.

        Each single call; all but each single call; and the calls from each one on, of
        all and of one file or directory. Calls below names that are hidden are lost or
        kept together, unless a rename to such a name may be lost.
        """
        shown = self._shown(when, is_hidden)
        pending = [call for call in self.pending(when) if self._places[call] in shown]
        found = self.losses(when, chance)
        found += [names := self._names(pending), frozenset(pending) - names]
        for i, call in enumerate(pending):
            place, rest = self._places[call], pending[i:]
            found += [(call,), frozenset(pending) - {call}, rest]
            found.append([other for other in rest if self._places[other] is place])
        return list(dict.fromkeys(map(frozenset, found)))

    def _names(self, calls):
        return {call for call in calls if isinstance(self._places[call], Directory)}

    def _shown(self, when, is_hidden):
        """The files and directories that may have a name that is not hidden."""
        found = set()

        def walk(directory):
            found.add(directory)
            there = {name: [what] for name, what in directory.base.items()}
            for at, name, what in directory.changes:
                if at >= when:
                    break
                is_durable = self._ends.get(at, when) < when
                there[name] = [*(() if is_durable else there.get(name, ())), what]
            for name, several in there.items():
                for what in several:
                    if what is None or is_hidden(name):
                        continue
                    if isinstance(what, Directory):
                        walk(what)
                    else:
                        found.add(what)

        walk(self._root)
        return found

    def applied(self, when, lost):
        """The calls whose changes are there after a cut; they determine the state."""
        return frozenset(
            call for call in self._places if call < when and call not in lost
        )

    def state(self, applied):
        """What is there if these calls took effect: path -> content or None."""
        found = {}

        def walk(directory, path):
            names = directory.base | {
                name: what for at, name, what in directory.changes if at in applied
            }
            for name, what in names.items():
                if isinstance(what, Directory):
                    found[f"{path}{name}"] = None
                    walk(what, f"{path}{name}/")
                elif what is not None:
                    done = [at for at, *_ in what.changes if at in applied]
                    found[f"{path}{name}"] = what.after(tuple(done))

        walk(self._root, "")
        return found


def digest(state):
    """What is equal if two states are."""
    made = hashlib.sha256()
    for path, content in sorted(state.items()):
        made.update(f"{path}\0".encode())
        made.update(b"/" if content is None else _digest(content))
    return made.digest()


@functools.lru_cache(maxsize=10_000)
def _digest(content):
    return hashlib.sha256(content).digest()


def put(state, root):
    """Makes a state true below a new directory."""
    root.mkdir(parents=True)
    for path, content in sorted(state.items()):
        if content is None:
            (root / path).mkdir()
        else:
            (root / path).write_bytes(content)
