"""Fingerprints of states, computed where the arrays are.

The fingerprints of states that differ in one element of a leaf always differ; others
are equal with probability 2^-64.
"""

from __future__ import annotations

import collections
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from flaxckpt import _state
from flaxckpt._types import LeafPath, PyTree


class Fingerprint(NamedTuple):
    """The checksums of the leaves of a state, on the host and on devices.

    Checksums of shards on a device are uint32 of shape `(shards, 2)`, perhaps not
    computed yet.
    """

    host: Mapping[LeafPath, object]
    devices: Mapping[str, tuple[Sequence[LeafPath], jax.Array]]

    def differences(self, other: Fingerprint) -> list[LeafPath]:
        """Returns the paths of leaves with other checksums, or without any."""
        one, two = self._by_place(), other._by_place()
        differing = [p[0] for p in one | two if one.get(p) != two.get(p)]
        return list(dict.fromkeys(differing))  # a leaf may be on several devices

    def _by_place(self) -> dict[tuple[LeafPath, str, int], object]:
        places: dict[tuple[LeafPath, str, int], object] = {
            (path, "", 0): checksum for path, checksum in self.host.items()
        }
        for device, (paths, checksums) in self.devices.items():
            for i, (path, sums) in enumerate(
                zip(paths, np.asarray(checksums), strict=True)
            ):
                places[path, device, i] = tuple(map(int, sums))
        return places


def take(state: PyTree) -> Fingerprint:
    """Returns the fingerprint of a state, without waiting for its arrays."""
    host: dict[LeafPath, object] = {}
    shards: dict[Any, list[tuple[LeafPath, jax.Array]]] = collections.defaultdict(list)
    for path, value in _state.flax_state.leaves_by_path(state).items():
        if isinstance(value, jax.Array):
            for shard in _state.bits.key_data(value).addressable_shards:
                shards[shard.device].append((path, shard.data))
        elif isinstance(value, np.ndarray | np.generic):
            digest = hashlib.blake2b(np.ascontiguousarray(value).tobytes()).digest()
            host[path] = value.shape, value.dtype.name, digest
        else:  # of other objects, the class alone can be compared
            is_plain = isinstance(value, str | bytes | bool | int | float | complex)
            host[path] = type(value), repr(value) if is_plain else None
    devices = {
        str(device): (
            tuple(path for path, _ in parts),
            _checksums([data for _, data in parts]),
        )
        for device, parts in shards.items()
    }
    return Fingerprint(host, devices)


@jax.jit
def _checksums(arrays: list[jax.Array]) -> jax.Array:
    """Returns the checksums of arrays on one device: uint32 of shape `(arrays, 2)`."""
    return jnp.stack([_checksum(array) for array in arrays])


def _checksum(array: jax.Array) -> jax.Array:
    """Returns two sums of all words, weighted by place: odd factors lose no bit."""
    words = _state.bits.as_words(array).ravel()
    place = jax.lax.iota(jnp.uint32, words.size)
    mixed = words ^ (place * np.uint32(0x9E3779B9))
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):  # MurmurHash3's
        mixed = (mixed ^ (mixed >> shift)) * np.uint32(factor)
    weighted = words * (2 * place + 1)
    return jnp.stack(
        [jnp.sum(sums, dtype=jnp.uint32) for sums in (weighted, mixed ^ (mixed >> 16))]
    )
