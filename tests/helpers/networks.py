"""A separate network for a server, with lost packets, resets and delays."""

import contextlib
import itertools
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers import store_servers

_numbers = itertools.count()


class Network:
    """A network namespace of Linux, and the link to it.

    Args:
        name: The name of the namespace, of at most a dozen characters.
        net: The first three numbers of its addresses.
    """

    def __init__(self, name: str, net: str) -> None:
        self.here, self.there = f"{net}.1", f"{net}.2"
        self._name = name
        self._wires = (f"{name}a", f"{name}b")

    def make(self) -> None:
        """Creates it; raises CalledProcessError without the permission."""
        ours, theirs = self._wires
        _run(f"ip netns add {self._name}")
        _run(f"ip link add {ours} type veth peer name {theirs} netns {self._name}")
        _run(f"ip addr add {self.here}/24 dev {ours}")
        _run(f"ip link set {ours} up")
        self._inside(f"ip addr add {self.there}/24 dev {theirs}")
        self._inside(f"ip link set {theirs} up")
        self._inside("ip link set lo up")
        self._inside("nft add table inet faults")
        self._inside(
            "nft add chain inet faults in { type filter hook input priority 0 ; }"
        )

    def remove(self) -> None:
        """Removes the namespace and the link, if they exist."""
        _run(f"ip link del {self._wires[0]}", check=False)
        _run(f"ip netns del {self._name}", check=False)

    def lose(self, percent: int) -> None:
        """Drops a percentage of the packets to the server."""
        self._rule(f"numgen random mod 100 < {percent} drop")

    def reset(self, percent: int) -> None:
        """Answers a percentage of the packets to the server with a reset."""
        self._rule(
            f"meta l4proto tcp numgen random mod 100 < {percent} reject with tcp reset"
        )

    def swallow(self) -> None:
        """Drops all packets to the server."""
        self._rule("drop")

    def slow(self, bytes_per_sec: int) -> None:
        """Limits the bandwidth in each direction."""
        ours, theirs = self._wires
        shape = f"root tbf rate {8 * bytes_per_sec} burst 32k latency 200ms"
        _run(f"tc qdisc replace dev {ours} {shape}")
        self._inside(f"tc qdisc replace dev {theirs} {shape}")

    def heal(self) -> None:
        """Removes all faults."""
        ours, theirs = self._wires
        self._inside("nft flush chain inet faults in")
        _run(f"tc qdisc del dev {ours} root", check=False)
        self._inside(f"tc qdisc del dev {theirs} root", check=False)

    @property
    def within(self) -> list[str]:
        """The prefix that runs a command in the namespace."""
        return ["ip", "netns", "exec", self._name]

    def _rule(self, rule: str) -> None:
        self.heal()
        self._inside(f"nft add rule inet faults in iifname {self._wires[1]} {rule}")

    def _inside(self, command: str, *, check: bool = True) -> None:
        _run(" ".join((*self.within, command)), check=check)


def _run(command: str, *, check: bool = True) -> None:
    subprocess.run(command.split(), check=check, capture_output=True, timeout=30)


@contextlib.contextmanager
def network() -> Iterator[Network]:
    """A network for the block; skips the test if none can be created."""
    missing = [name for name in ("ip", "nft", "tc") if shutil.which(name) is None]
    if missing or os.geteuid() != 0:
        pytest.skip(f"needs root, and ip, nft and tc: {missing or 'no root'}")
    number = next(_numbers)
    made = Network(f"fx{os.getpid()}n{number}", _free_net(number))
    try:
        try:
            made.make()
        except subprocess.CalledProcessError as error:
            reason = error.stderr.decode(errors="replace").strip()
            pytest.skip(f"cannot create a network: {' '.join(error.cmd)}: {reason}")
        yield made
    finally:
        made.remove()


def _free_net(number: int) -> str:
    """Returns a free part of 198.18.0.0/15, which is reserved for network tests."""
    used = subprocess.run(
        ["ip", "-4", "addr"], check=True, capture_output=True, text=True
    ).stdout
    for offset in range(256):
        net = f"198.18.{(os.getpid() + number + offset) % 256}"
        if f" {net}." not in used:
            return net
    raise AssertionError(used)


@contextlib.contextmanager
def moto(made: Network, directory: Path) -> Iterator[store_servers.Server]:
    """A server in a network, with a bucket."""
    server = store_servers.moto(directory, host=made.there, within=made.within)
    try:
        server.start()
        yield server
    finally:
        server.kill()
