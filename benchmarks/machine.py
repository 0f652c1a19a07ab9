"""Where and with what a run was measured."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import re
from dataclasses import dataclass
from pathlib import Path

import jax

PACKAGES = (
    "flaxckpt",
    "jax",
    "jaxlib",
    "flax",
    "optax",
    "tensorstore",
    "numpy",
    "orbax-checkpoint",
    "safetensors",
)


@dataclass(frozen=True, slots=True)
class Machine:
    """The machine, its software and the date.

    Attributes:
        date: ISO 8601, UTC.
        system: The operating system.
        cpu: The processor's name.
        cores: How many this process may use.
        memory_bytes: All of the machine's.
        filesystem: Type of that which is written to.
        devices: Kinds of devices that jax has.
        python: Its version.
        versions: Package -> version; None if it is not installed.
    """

    date: str
    system: str
    cpu: str
    cores: int
    memory_bytes: int
    filesystem: str
    devices: tuple[str, ...]
    python: str
    versions: dict[str, str | None]

    def __str__(self) -> str:
        return (
            f"{self.cpu}, {self.cores} cores,"
            f" {self.memory_bytes / 1e9:.1f} GB of memory, {self.filesystem}"
        )


def describe(directory: Path) -> Machine:
    """Describes this machine, with the file system that holds `directory`."""
    return Machine(
        datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        platform.platform(),
        _cpu(),
        _cores(),
        os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        _filesystem(directory),
        tuple(sorted({device.device_kind for device in jax.devices()})),
        platform.python_version(),
        {name: _version(name) for name in PACKAGES},
    )


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):  # Linux
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _cpu() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        found = re.search(r"^model name\s*:\s*(.+)$", cpuinfo.read_text(), re.MULTILINE)
        if found:
            return found[1]
    return platform.processor() or platform.machine()


def _filesystem(directory: Path) -> str:
    """Type of the file system that holds `directory`, as `ext4`."""
    mounts = Path("/proc/mounts")
    if not mounts.exists():
        return "unknown"
    here = directory.resolve()
    points = [line.split()[1:3] for line in mounts.read_text().splitlines()]
    holding = [
        (len(Path(point).parts), kind)
        for point, kind in points
        if here.is_relative_to(point)
    ]
    # Of what is mounted one above the other, the last counts.
    return max(reversed(holding), key=lambda found: found[0])[1]


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
