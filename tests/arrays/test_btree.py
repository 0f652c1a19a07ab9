"""Trees of OCDBT databases against TensorStore's own."""

import itertools

import crc32c
import pytest
import tensorstore as ts
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from flaxckpt._zarr import btree

FILES = ("data", "data.1", "deep/er", "")
CONTEXT = ts.Context()
numbers = itertools.count()


def values_of(keys):
    inline = st.binary(max_size=200) | st.just(bytes(4096))  # of a compressed node
    places = st.builds(
        btree.Place,
        st.sampled_from(FILES[:3]),
        st.integers(0, 3000),
        st.integers(0, 1000),
    )
    return st.dictionaries(keys, inline | places, min_size=1, max_size=60)


keys = st.binary(min_size=1, max_size=20) | st.from_regex(
    r"[ab]{0,6}/(c/[0-9]{1,3}|zarr.json)", fullmatch=True
).map(str.encode)
CONTENT = bytes(i * 37 % 251 for i in range(4000))


def store(files):
    """Returns a store in memory with files, as a spec."""
    spec = {"driver": "memory", "path": f"{next(numbers)}/"}
    kv = ts.KvStore.open(spec, context=CONTEXT).result()
    for name, content in files.items():
        kv.write(name, content).result()
    return kv


def database(kv, **options):
    spec = {"driver": "ocdbt", "base": kv.spec().to_json(), **options}
    return ts.KvStore.open(spec, context=CONTEXT).result()


def read_by_tensorstore(kv):
    opened = database(kv)
    return {key: opened.read(key).result().value for key in opened.list().result()}


def read_by_us(kv):
    def content(place):
        part = slice(place.offset, place.offset + place.size)
        return kv.read(place.file, byte_range=part).result().value

    def entries(place, base, height, prefix):
        if height:
            for child in btree.decode_inner(
                btree.unpack_node(content(place)), base, height
            ):
                yield from entries(
                    child.place, child.base, height - 1, prefix + child.prefix
                )
        else:
            for key, value in btree.decode_leaf(
                btree.unpack_node(content(place)), base
            ):
                is_inline = isinstance(value, bytes)
                yield prefix + key, value if is_inline else content(value)

    root = btree.decode_manifest(
        btree.unpack_manifest(kv.read("manifest.ocdbt").result().value)
    )
    return {} if root is None else dict(entries(*root, b""))


@given(values_of(keys), st.integers(1, 4000))
def test_tensorstore_lists_and_reads_encoded_trees(values, node_bytes):
    tree = btree.encode(values, "tree", node_bytes=node_bytes)
    files = dict.fromkeys(FILES[:3], CONTENT)
    files |= {"tree": tree.nodes, "manifest.ocdbt": tree.manifest}
    kv = store(files)
    wanted = {
        key: value
        if isinstance(value, bytes)
        else CONTENT[value.offset : value.offset + value.size]
        for key, value in values.items()
    }
    assert read_by_tensorstore(kv) == wanted
    assert read_by_us(kv) == wanted


@given(
    st.dictionaries(keys, st.binary(max_size=300), max_size=60),
    st.sampled_from([None, {"id": "zstd", "level": 1}]),
    st.integers(1, 2000),
)
def test_decodes_databases_written_by_tensorstore(values, compression, node_bytes):
    config = {"max_decoded_node_bytes": node_bytes, "compression": compression}
    kv = store({})
    opened = database(kv, config=config)
    transaction = ts.Transaction()
    opened.write(b"gone", b"").result()
    for key, value in values.items():
        opened.with_transaction(transaction)[key] = value
    transaction.commit_async().result()
    opened.write(b"gone", None).result()
    assert read_by_us(kv) == {key: v for key, v in values.items() if key != b"gone"}


def test_large_tree_has_multiple_levels():
    values = {f"layer_{n}/kernel/c/0/{n}".encode(): b"x" for n in range(10**5)}
    tree = btree.encode(values, "tree", node_bytes=2**12)
    kv = store({"tree": tree.nodes, "manifest.ocdbt": tree.manifest})
    root = btree.decode_manifest(btree.unpack_manifest(tree.manifest))
    assert root.height >= 2
    dumped = ts.ocdbt.dump(kv, None).result()["versions"][-1]
    assert dumped["root_height"] == root.height
    assert dumped["root"]["statistics"]["num_keys"] == len(values)
    assert read_by_us(kv) == values
    assert len(database(kv).list().result()) == len(values)


def test_reads_empty_tree():
    kv = store({})
    opened = database(kv)
    opened.write(b"a", b"").result()
    opened.write(b"a", None).result()
    assert read_by_us(kv) == {}


def test_merged_database_resolves_files_relative_to_nodes():
    whole = store({})
    base = whole.spec().to_json()
    for part in ("part.0", "part.1"):
        below = {"driver": "ocdbt", "base": base | {"path": f"{base['path']}{part}/"}}
        opened = ts.KvStore.open(below, context=CONTEXT).result()
        transaction = ts.Transaction()
        for n in range(300):
            opened.with_transaction(transaction)[f"{part}/{n}"] = bytes(200)
        transaction.commit_async().result()
        copied = ts.Transaction(atomic=True)
        target = database(whole).with_transaction(copied)
        opened.experimental_copy_range_to(target).result()
        copied.commit_async().result()
    found = read_by_us(whole)
    assert len(found) == 600
    assert found == read_by_tensorstore(whole)


TREE = btree.encode(
    {b"a/c/0": btree.Place("data", 0, 9), b"a/zarr.json": b"{}", b"b": b"x" * 60},
    "tree",
    node_bytes=30,
)


def decode_all(manifest, nodes):
    root = btree.decode_manifest(btree.unpack_manifest(manifest))
    place = root.place
    content = nodes[place.offset : place.offset + place.size]
    children = btree.decode_inner(btree.unpack_node(content), root.base, root.height)
    return [
        btree.decode_leaf(
            btree.unpack_node(nodes[c.place.offset :][: c.place.size]), c.base
        )
        for c in children
    ]


def test_detects_bit_flips_and_truncation():
    whole = decode_all(TREE.manifest, TREE.nodes)
    for content in TREE:
        for at in range(len(content)):
            bad = bytearray(content)
            bad[at] ^= 1 << at % 8
            for changed in (bytes(bad), content[:at]):
                both = [changed if c is content else c for c in (TREE[1], TREE[0])]
                with pytest.raises(ValueError, match=r"^(it|its|a) "):
                    assert decode_all(*both) != whole


@pytest.mark.parametrize(
    ("base", "file"),
    [
        ("", "../out"),
        ("", "/etc/passwd"),
        ("/etc/", "passwd"),
        ("", "a/../../b"),
        ("../", "secret"),
        (".", "./secret"),
        ("", "a\0b"),
    ],
)
def test_rejects_files_outside_database(base, file):
    tree = btree.encode({b"a": btree.Place(file, 0, 1)}, "tree")
    with pytest.raises(ValueError, match="not a file in the database"):
        btree.decode_leaf(btree.unpack_node(tree.nodes), base)


def framed(body, magic=b"\x0c\xdb\x20\xde", compression=0):
    content = bytes([0, compression]) + body
    head = magic + (12 + len(content) + 4).to_bytes(8, "little") + content
    return head + crc32c.crc32c(head).to_bytes(4, "little")


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (b"\0\0" + b"\xff" * 9 + b"\x01", "wanted 1 to"),  # 2^64 - 1 entries
        (b"\0\0" + b"\xff" * 10 + b"\x01", "too large"),
        (b"\1\0\0", "height"),
        (b"\0\0\2" + b"\5" + b"\1\1" + b"ab" + b"\0\0" * 2, "longer than"),
        (b"\0\0\2" + b"\0" + b"\1\1" + b"ba" + b"\0\0" * 2, "ascending"),
        (b"\0\0\1" + b"\1" + b"a" + b"\0" + b"\2", "unknown kind"),
        (b"\0\0\1" + b"\1" + b"a" + b"\1" + b"\1" + b"\0\0", "does not name"),
        (b"\0\0\1" + b"\1" + b"a" + b"\0" + b"\0" + b"more", "more than its fields"),
        (b"\0\0\1" + b"\1" + b"a" + b"\x7f" + b"\0" + b"v", "cut short"),
    ],
)
def test_rejects_hostile_nodes(body, why):
    with pytest.raises(ValueError, match=why):
        btree.decode_leaf(btree.unpack_node(framed(body)), "")


def test_rejects_nodes_expanding_too_much():
    body = zstandard.compress(bytes(btree.MAX_NODE_BYTES + 1))
    with pytest.raises(ValueError, match="expands to more"):
        btree.unpack_node(framed(body, compression=1))
    with pytest.raises(ValueError, match="cannot be decompressed"):
        btree.unpack_node(framed(b"xyz", compression=1))
