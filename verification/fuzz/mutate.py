"""Small changes to files: of bytes, and of the JSON and msgpack that they hold."""

import json
import random
from collections.abc import Sequence
from typing import Any, Final

import msgpack

MAX_BYTES: Final = 2**14

NUMBERS: Final = (
    *(0, 1, -1, 2, 255, 2**31 - 1, 2**31, 2**32, 2**40, 2**48, 2**60, 2**63, 2**64),
    *(-(2**63), 1.5, -0.0, 1e308, float("inf"), float("-inf"), float("nan")),
    *(True, False, None, 10**400),
)
TEXTS: Final = (
    *("", ".", "..", "../../secret", "/etc/passwd", "a\0b", "\n" * 20, "\ud800", "a/b"),
    *("file:///etc/", "http://127.0.0.1:9/", "object", "|O", "<f4", "bfloat16", "int4"),
    *("f4,f4", "(1+,)f4", "zarr", "zarr3", "ocdbt", "gzip", "zstd", "blosc", "pickle"),
    *("sharding_indexed", "crc32c", "transpose", "x" * 300, "%2F", "~", "w", "1e999"),
    *("optax._src.base:EmptyState", "flax.core.frozen_dict:FrozenDict", "os:system"),
    *("dict", "list", "tuple", "None", "jax.Array", "numpy.ndarray", "str", "rbg"),
)
TOKENS: Final = (
    *(b"[", b"]", b"{", b"}", b",", b":", b'"', b"\\u0000", b"\\ud800", b"1e999"),
    *(b"NaN", b"-Infinity", b"\xff\xff\xff\xff", b"\0" * 8, b"\x7f" + b"\xff" * 7),
    *(b"\xdd\xff\xff\xff\xff", b"\xc7", b"\xc9", b"\xc1", b"\x80", b"\x91", b"\xd4"),
    *(b"\x28\xb5\x2f\xfd", b"\x1f\x8b\x08", b"\xef\xbb\xbf", b"9" * 30, b"[" * 99),
)


def mutated(
    rng: random.Random, data: bytes, others: Sequence[bytes], kind: str
) -> bytes:
    """`data`, changed in a few places.

    Args:
        rng: Decides.
        data: What is changed.
        others: Parts of these may come in.
        kind: `json` and `msgpack` are changed as what they say, too.
    """
    change = {"json": _json, "msgpack": _msgpack}.get(kind, _bytes)
    for _ in range(rng.choice((1, 1, 2, 3, 5))):
        data = (change if rng.random() < 0.7 else _bytes)(rng, data, others)
    return data[:MAX_BYTES]


def _bytes(rng: random.Random, data: bytes, others: Sequence[bytes]) -> bytes:
    at, length = rng.randrange(len(data) + 1), rng.choice((0, 1, 1, 2, 4, 8, 32))
    end = min(at + length, len(data))
    other = rng.choice(others) if others else data
    cut = rng.randrange(len(other) + 1)
    new = rng.choice(
        (
            b"",
            rng.randbytes(end - at),
            rng.randbytes(length),
            data[at:end] * 2,
            rng.choice(TOKENS),
            other[cut : cut + rng.choice((1, 4, 16, 64))],
            bytes(byte ^ (1 << rng.randrange(8)) for byte in data[at:end]),
            rng.choice((1, 2**31, 2**32 - 1, 2**40, 2**63)).to_bytes(8, "little"),
        )
    )
    if rng.random() < 0.03:
        return data[:at] + other[cut:]
    return data[:at] + new + data[end:]


def _json(rng: random.Random, data: bytes, others: Sequence[bytes]) -> bytes:
    try:
        tree = json.loads(data)
    except (ValueError, RecursionError):
        return _bytes(rng, data, others)
    try:
        donor = json.loads(rng.choice(others)) if others else tree
    except (ValueError, RecursionError):
        donor = tree
    text = json.dumps(_changed(rng, tree, donor), separators=(",", ":"))
    return text.encode(errors="surrogatepass")


def _msgpack(rng: random.Random, data: bytes, others: Sequence[bytes]) -> bytes:
    try:
        unpacker = msgpack.Unpacker(strict_map_key=False, raw=True)
        unpacker.feed(data)
        trees = list(unpacker)
        tree = _changed(rng, trees, trees)
        packed = [msgpack.packb(item, use_bin_type=True) for item in tree]
        return b"".join(packed)
    except Exception:
        return _bytes(rng, data, others)


def _changed(rng: random.Random, tree: Any, donor: Any) -> Any:
    """A copy of `tree`, with one of its values another one."""
    if not isinstance(tree, dict | list) or not tree or rng.random() < 0.05:
        return _value(rng, tree, donor)
    if isinstance(tree, list):
        copied = list(tree)
        at = rng.randrange(len(copied))
        match rng.randrange(12):
            case 0:
                del copied[at]
            case 1:
                copied.insert(at, copied[rng.randrange(len(copied))])
            case _:
                copied[at] = _changed(rng, copied[at], donor)
        return copied
    pairs = list(tree.items())
    at = rng.randrange(len(pairs))
    key, value = pairs[at]
    match rng.randrange(12):
        case 0:
            del pairs[at]
        case 1:
            pairs[at] = (rng.choice(TEXTS), value)
        case 2:
            pairs.append((rng.choice(TEXTS), rng.choice(pairs)[1]))
        case _:
            pairs[at] = (key, _changed(rng, value, donor))
    return dict(pairs)


def _value(rng: random.Random, value: Any, donor: Any) -> Any:
    match rng.randrange(8):
        case 0:
            return rng.choice(NUMBERS)
        case 1:
            return rng.choice(TEXTS)
        case 2:
            return [value]
        case 3:
            return {"a": value}
        case 4:
            return rng.choice(([], {}, [value, value], [[value]]))
        case 5 if isinstance(value, int) and not isinstance(value, bool):
            return value + rng.choice((-1, 1, 2**31))
        case 6 if isinstance(value, str):
            at = rng.randrange(len(value) + 1)
            return value[:at] + rng.choice(TEXTS) + value[at:]
    while isinstance(donor, dict | list) and donor and rng.random() < 0.8:
        parts = donor if isinstance(donor, list) else list(donor.values())
        donor = rng.choice(parts)
    return donor
