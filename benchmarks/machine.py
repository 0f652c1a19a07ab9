"""The machine and the software of a run."""

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
        cores: The number of cores that this process may use.
        memory_bytes: The memory of the machine.
        filesystem: The type of the file system of the checkpoints.
        devices: The kinds of jax devices.
        python: The version of Python.
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
        name = re.search(r"^model name\s*:\s*(.+)$", cpuinfo.read_text(), re.MULTILINE)
        if name:
            return name[1]
    return platform.processor() or platform.machine()


def _filesystem(directory: Path) -> str:
    """Returns the type of the file system of `directory`, such as `ext4`."""
    mounts = Path("/proc/mounts")
    if not mounts.exists():
        return "unknown"
    path = directory.resolve()
    points = [line.split()[1:3] for line in mounts.read_text().splitlines()]
    mounted = [
        (len(Path(point).parts), kind)
        for point, kind in points
        if path.is_relative_to(point)
    ]
    # Of several mounts at one point, the last counts.
    return max(reversed(mounted), key=lambda mount: mount[0])[1]


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
