"""File systems made for the tests, each mounted at two places."""

import contextlib
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

IMAGE_BYTES = 1536 * 2**20
LOOPBACK = "127.0.0.1"


class UnavailableError(Exception):
    """A file system that this machine cannot have; the message says why."""


def run(*command: str | Path) -> str:
    """Runs a command; returns its output.

    Raises:
        UnavailableError: The program is missing, or fails.
    """
    words = [str(word) for word in command]
    if shutil.which(words[0]) is None:
        raise UnavailableError(f"{words[0]} is not installed")
    done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines()
        raise UnavailableError(f"{words[0]}: {said[0] if said else done.returncode}")
    return done.stdout


@contextlib.contextmanager
def mounted(where: Path, *command: str | Path) -> Iterator[Path]:
    """Runs a command that mounts at `where`; unmounts at the end."""
    where.mkdir(parents=True, exist_ok=True)
    run(*command, where)
    try:
        yield where
    finally:
        for options in ([], [], ["-l"]):  # a process may still be leaving it
            if not subprocess.run(["umount", *options, where], check=False).returncode:
                break
            time.sleep(1)


@contextlib.contextmanager
def twice(first: Path, root: Path) -> Iterator[tuple[Path, Path]]:
    """Yields a mounted directory, and the same mounted elsewhere on this machine."""
    with mounted(root / "second", "mount", "--bind", first) as second:
        yield first, second


@contextlib.contextmanager
def tmpfs(root: Path) -> Iterator[tuple[Path, Path]]:
    with (
        mounted(root / "first", "mount", "-t", "tmpfs", "flaxckpt") as first,
        twice(first, root) as both,
    ):
        yield both


@contextlib.contextmanager
def image(root: Path, *make: str) -> Iterator[Path]:
    """Yields a new file system on a loop device."""
    root.mkdir(parents=True, exist_ok=True)
    file = root / "image"
    with file.open("wb") as empty:
        empty.truncate(IMAGE_BYTES)
    try:
        run(*make, file)
        with mounted(root / "first", "mount", "-o", "loop", file) as first:
            yield first
    finally:
        file.unlink()


def on_disk(*make: str) -> Callable[[Path], contextlib.AbstractContextManager]:
    """Returns the function that mounts what `make` has made."""

    @contextlib.contextmanager
    def disk(root: Path) -> Iterator[tuple[Path, Path]]:
        with image(root, *make) as first, twice(first, root) as both:
            yield both

    return disk


@contextlib.contextmanager
def casefold(root: Path) -> Iterator[tuple[Path, Path]]:
    if not Path("/sys/fs/ext4/features/casefold").exists():
        raise UnavailableError("this kernel is built without CONFIG_UNICODE")
    with image(root, "mkfs.ext4", "-q", "-F", "-O", "casefold") as first:
        folded = first / "folded"
        folded.mkdir()
        run("chattr", "+F", folded)
        with twice(folded, root) as both:
            yield both


@contextlib.contextmanager
def overlay(root: Path) -> Iterator[tuple[Path, Path]]:
    with image(root / "below", "mkfs.ext4", "-q", "-F") as disk:
        for name in ("lower", "upper", "work"):
            (disk / name).mkdir()
        options = f"lowerdir={disk}/lower,upperdir={disk}/upper,workdir={disk}/work"
        mount = ("mount", "-t", "overlay", "overlay", "-o", options)
        with mounted(root / "first", *mount) as first, twice(first, root) as both:
            yield both


@contextlib.contextmanager
def bindfs(root: Path) -> Iterator[tuple[Path, Path]]:
    """FUSE, two servers of one directory: each has locks and caches of its own."""
    (root / "source").mkdir()
    with (
        mounted(root / "first", "bindfs", root / "source") as first,
        mounted(root / "second", "bindfs", root / "source") as second,
    ):
        yield first, second


@contextlib.contextmanager
def fuse_overlayfs(root: Path) -> Iterator[tuple[Path, Path]]:
    for name in ("lower", "upper", "work"):
        (root / name).mkdir()
    options = f"lowerdir={root}/lower,upperdir={root}/upper,workdir={root}/work"
    mount = ("fuse-overlayfs", "-o", options)
    with mounted(root / "first", *mount) as first, twice(first, root) as both:
        yield both


@contextlib.contextmanager
def nfs(root: Path) -> Iterator[tuple[Path, Path]]:
    """NFSv4.2 from the kernel's server on the loopback, and two clients.

    `nosharecache` gives each mount caches of its own, as two machines have. The server
    listens on the loopback only, and is stopped at the end.
    """
    for module in ("nfsd", "nfsv4"):
        subprocess.run(["modprobe", "-q", module], check=False)
    known = Path("/proc/filesystems").read_text(encoding="ascii").split()
    if "nfs4" not in known or "nfsd" not in known:
        raise UnavailableError("this kernel has no NFS client, or no NFS server")
    exports = Path("/proc/fs/nfsd/threads")
    if exports.exists() and exports.read_text(encoding="ascii").strip() != "0":
        raise UnavailableError("an NFS server of somebody else is running here")
    with contextlib.ExitStack() as stack:
        disk = stack.enter_context(image(root, "mkfs.ext4", "-q", "-F"))
        nfsd = Path("/proc/fs/nfsd")
        if not (nfsd / "threads").exists():
            run("mount", "-t", "nfsd", "nfsd", nfsd)
            stack.callback(subprocess.run, ["umount", str(nfsd)], check=False)
        export = f"{LOOPBACK}:{disk}"
        options = "rw,sync,no_root_squash,no_subtree_check,fsid=0,insecure"
        Path("/var/lib/nfs").mkdir(parents=True, exist_ok=True)
        for name in ("etab", "rmtab"):
            Path("/var/lib/nfs", name).touch()
        run("exportfs", "-o", options, export)
        stack.callback(subprocess.run, ["exportfs", "-u", export], check=False)
        mountd = subprocess.Popen(["rpc.mountd", "-F", "-N", "2", "-N", "3"])
        stack.callback(_end, mountd)
        seconds = ("--grace-time", "10", "--lease-time", "10")
        run("rpc.nfsd", "--host", LOOPBACK, "-N", "3", "-V", "4.2", *seconds, "4")
        stack.callback(subprocess.run, ["rpc.nfsd", "0"], check=False)
        mount = ("mount", "-t", "nfs4", "-o", "vers=4.2,nosharecache", f"{LOOPBACK}:/")
        first = stack.enter_context(mounted(root / "client1", *mount))
        yield first, stack.enter_context(mounted(root / "client2", *mount))


def _end(process: subprocess.Popen) -> None:
    process.terminate()
    process.wait(60)


KINDS: dict[str, Callable[[Path], contextlib.AbstractContextManager]] = {
    "tmpfs": tmpfs,
    "ext4": on_disk("mkfs.ext4", "-q", "-F"),
    "ext4-casefold": casefold,
    "xfs": on_disk("mkfs.xfs", "-q", "-f"),
    "btrfs": on_disk("mkfs.btrfs", "-q", "-f"),
    "overlay": overlay,
    "bindfs": bindfs,
    "fuse-overlayfs": fuse_overlayfs,
    "nfs4": nfs,
}
