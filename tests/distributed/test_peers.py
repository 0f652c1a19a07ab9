"""What a process gets from another: files, or an error in time."""

import contextlib
import http.client
import os
import socket
import statistics
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

import flaxckpt
from flaxckpt import errors
from flaxckpt._distributed import peer_files
from flaxckpt._run.tiers import parts
from flaxckpt._util import processes
from tests.distributed import jobs


@pytest.fixture(params=["plain", "tls"])
def server(request, tmp_path):
    (tmp_path / "shared/step").mkdir(parents=True)
    (tmp_path / "secret").write_text("secret")
    is_tls = request.param == "tls"
    certificate = jobs.make_certificate(tmp_path) if is_tls else None
    server = peer_files.FileServer(tmp_path / "shared", "127.0.0.1", certificate)
    yield server
    server.close()


def test_serves_only_peers_with_certificate(tmp_path):
    (tmp_path / "file").write_text("content")
    (tmp_path / "other").mkdir()
    ours, others = (
        jobs.make_certificate(tmp_path),
        jobs.make_certificate(tmp_path / "other"),
    )
    server = peer_files.FileServer(tmp_path, "127.0.0.1", ours)
    for certificate in (others, None):
        with (
            connected(server, certificate=certificate) as peer,
            pytest.raises(OSError, match=r"(?i)certificate|ssl|disconnected|reset"),
        ):
            peer.read(["file"], 100)
    with connected(server) as peer:
        assert peer.read(["file"], 100) == {"file": b"content"}
    server.close()


@pytest.mark.parametrize(
    ("option", "value", "text"),
    [
        ("peer_network", "10.0.0.5/8", "10.1.0.0/16"),
        ("peer_network", "eth0", "10.1.0.0/16"),
        ("peer_certificate", "missing.pem", "Pass a PEM file"),
        ("peer_certificate", __file__, "Pass a PEM file"),
        ("staging_copies", -1, "staging_copies"),
        ("failure_domain", "rack", "a function of the process index"),
        ("staging", 5, "staging must be a directory, or a function"),
        ("staging", lambda index: None, "staging must be a directory, or a function"),
    ],
)
def test_rejects_invalid_options_on_opening(tmp_path, option, value, text):
    with pytest.raises(errors.OptionError, match=text):
        flaxckpt.Checkpointer(tmp_path, **{option: value})


@pytest.mark.parametrize(
    ("options", "days"),
    [((), -1), (("-addext", "extendedKeyUsage=serverAuth"), 2)],
    ids=["expired", "for servers only"],
)
def test_rejects_certificate_that_no_peer_would_accept(tmp_path, options, days):
    certificate = jobs.make_certificate(tmp_path, *options, days=days)
    with pytest.raises(errors.OptionError, match="valid now, for servers and clients"):
        flaxckpt.Checkpointer(tmp_path / "run", peer_certificate=certificate)


def test_finds_own_address_in_network():
    assert processes.own_address("127.0.0.0/8") == "127.0.0.1"
    mine = processes.own_address("0.0.0.0/0")
    others = ["198.51.100.0/24", "203.0.113.0/24"]  # of documents
    other = next(net for net in others if not net.startswith(mine.rpartition(".")[0]))
    with pytest.raises(OSError, match="no address in"):
        processes.own_address(other)


def connected(server, **changed):
    return peer_files.PeerConnection(server.peer._replace(**changed))


def test_copies_file_exactly(server, tmp_path):
    content = os.urandom(3_000_001)
    (tmp_path / "shared/step/a file").write_bytes(content)
    with connected(server) as peer:
        received = peer.copy("step/a file", tmp_path / "copy", len(content))
        assert b"".join(map(bytes, received)) == content
        name, other = "step/a file", "step/&name=no"
        assert peer.read([name, other], 2**22) == {name: content}
        with pytest.raises(OSError, match="may have 3000000"):
            peer.read([name], 3_000_000)
    assert (tmp_path / "copy").read_bytes() == content


def test_a_small_file_waits_for_no_confirmation(server, tmp_path):
    (tmp_path / "shared/step/file").write_bytes(b"content")
    times = []
    with connected(server) as peer:
        for _ in range(50):
            begin = time.perf_counter()
            peer.read(["step/file"], 100)
            times.append(time.perf_counter() - begin)
    assert statistics.median(times) < 0.03  # a late confirmation takes 40 ms


def test_resumes_interrupted_copy(server, tmp_path):
    (tmp_path / "shared/step/file").write_bytes(b"0123456789")
    (tmp_path / "copy").write_bytes(b"01x")  # what is there is not read again
    with connected(server) as peer:
        for _ in range(2):  # the second has nothing left
            received = peer.copy("step/file", tmp_path / "copy", 10)
            assert b"".join(map(bytes, received)) == b"01x3456789"
    assert (tmp_path / "copy").read_bytes() == b"01x3456789"


@pytest.mark.parametrize(
    "name", ["../secret", "step/../../secret", "/etc/passwd", "step", "", "no", "a\0b"]
)
def test_serves_no_other_paths(server, tmp_path, name):
    with connected(server) as peer:
        assert peer.read([name], 100) == {}
        with pytest.raises(FileNotFoundError):
            next(peer.copy(name, tmp_path / "copy", 1))


def test_reads_many_small_files_at_once(server, tmp_path):
    names = [f"step/{n}" for n in range(120)]
    content = {name: os.urandom(n) for n, name in enumerate(names)}
    for name in names[::2]:
        (tmp_path / "shared" / name).write_bytes(content[name])
    with connected(server) as peer:
        assert peer.read(names, 120) == {name: content[name] for name in names[::2]}


def test_does_not_follow_links(server, tmp_path):
    (tmp_path / "shared/step/link").symlink_to(tmp_path / "secret")
    (tmp_path / "shared/away").symlink_to(tmp_path)
    with connected(server) as peer:
        assert peer.read(["step/link", "away/secret"], 100) == {}


def test_serves_only_peers_with_token(server, tmp_path):
    (tmp_path / "shared/step/file").write_text("content")
    with (
        connected(server, token="guessed") as peer,
        pytest.raises(OSError, match="403"),
    ):
        peer.read(["step/file"], 100)
    if server.peer.certificate is None:
        http_client = http.client.HTTPConnection(server.peer.host, server.peer.port)
        http_client.request("GET", "/step/file")
        assert http_client.getresponse().status == 403
        http_client.request("DELETE", "/step/file")
        assert http_client.getresponse().status == 501
    assert (tmp_path / "shared/step/file").exists()


def test_closed_server_refuses_connections(server, tmp_path):
    server.close()
    with connected(server) as peer, pytest.raises(ConnectionError):
        next(peer.copy("step/file", tmp_path / "copy", 1))


@contextlib.contextmanager
def answering(answer):
    """A peer that sends `answer` to each request, and then stays silent."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve():
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            kept.callback(connection.close)
            connection.recv(4096)
            connection.sendall(answer)

    with contextlib.ExitStack() as kept, listener:
        thread = threading.Thread(target=serve)
        thread.start()
        yield peer_files.Peer("127.0.0.1", listener.getsockname()[1], "token")
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 11\r\n\r\n0123456789x",
        b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n012345678",
        b"HTTP/1.1 200 OK\r\n\r\n" + b"0" * 100,
        b"HTTP/1.1 206 Partial\r\nContent-Length: 10\r\n\r\n0123456789",
        b"HTTP/1.1 500 Broken\r\nContent-Length: 0\r\n\r\n",
        b"no http at all\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\n012",
        b"",
    ],
    ids=["longer", "shorter", "endless", "part", "error", "noise", "stops", "silent"],
)
def test_dishonest_or_silent_peer_raises_error(answer, tmp_path):
    told = pytest.raises(OSError, match=r"file|timed out|refused|reset")
    with (
        answering(answer) as peer,
        told,
        peer_files.PeerConnection(peer, silent_secs=0.5) as connection,
    ):
        b"".join(connection.copy("file", tmp_path / "copy", 10))


@pytest.mark.parametrize(
    "sizes",
    [
        "",
        "no",
        "[5]",
        "[5, 5, 5]",
        "[5, 6]",
        "[5, -1]",
        "[99, 5]",
        "{}",
        "9",
        "[Infinity, 5]",
    ],
)
def test_dishonest_sizes_raise_error(sizes):
    answer = f"HTTP/1.1 200 OK\r\nFile-Sizes: {sizes}\r\nContent-Length: 10\r\n\r\n"
    with (
        answering(answer.encode() + b"0123456789") as peer,
        peer_files.PeerConnection(peer, silent_secs=0.5) as connection,
        pytest.raises(OSError, match=r"one|two"),
    ):
        connection.read(["one", "two"], 50)


SAVES = st.sampled_from(["one", "other"])


@st.composite
def holdings(draw):
    """What up to four processes have of three steps, each of up to three parts."""
    totals = {step: draw(st.integers(1, 3)) for step in range(3)}

    def held():
        steps = draw(st.sets(st.sampled_from([*totals])))
        return {
            step: parts.Held(
                draw(SAVES),
                totals[step],
                tuple(sorted(draw(st.sets(st.integers(0, totals[step] - 1))))),
            )
            for step in steps
        }

    return [held() for _ in range(draw(st.integers(1, 4)))]


@given(holdings(), st.dictionaries(st.integers(0, 3), SAVES))
def test_step_is_whole_with_all_parts_of_one_save(held, far):
    found, lost = parts.choose(held, far)
    assert [step for step, *_ in found] == sorted((s for s, *_ in found), reverse=True)
    for step, save, holders, is_far in found:
        if save is None:
            assert step in far
            continue
        assert is_far == (far.get(step) == save)
        for part, having in holders.items():
            assert having or is_far
            for process in having:
                here = held[process][step]
                assert here.save == save
                assert part in here.parts
    whole = {step for step, *_ in found}
    assert whole.isdisjoint(each.step for each in lost)
    assert whole | {each.step for each in lost} == {s for row in held for s in row} | {
        *far
    }
    for step, missing, _ in lost:
        for part in missing:
            saves = {row[step].save for row in held if step in row}
            assert any(
                part not in row[step].parts
                for save in saves
                for row in held
                if step in row and row[step].save == save
            )


def test_prefers_newest_save_of_step():
    old = parts.Held("old", 1, (0,), created=1)
    new = parts.Held("new", 1, (0,), created=2)
    found, _ = parts.choose([{5: old}, {5: new}], {})
    assert [whole.save for whole in found] == ["new", "old"]
    uploaded = old._replace(is_settled=True)
    found, _ = parts.choose([{5: uploaded}], {5: "later"})
    assert [whole.save for whole in found] == [None]
    found, _ = parts.choose([{5: uploaded}], {5: "old"})
    assert [whole.save for whole in found] == ["old", None]


@given(st.lists(st.sampled_from("abc"), max_size=9), st.integers(0, 3))
def test_spreads_copies_over_other_domains(domains, count):
    keepers = parts.choose_copies(domains, count)
    for process, chosen in enumerate(keepers):
        others = [n for n, name in enumerate(domains) if name != domains[process]]
        assert len(chosen) == min(count, len({domains[n] for n in others}))
        assert {*chosen} <= {*others}
        assert len({domains[n] for n in chosen}) == len(chosen)


def test_balances_copies_among_processes():
    for keepers in (parts.choose_copies("aabb", 1), parts.choose_copies("abcdef", 2)):
        load = [process for chosen in keepers for process in chosen]
        assert len({load.count(process) for process in load}) == 1
