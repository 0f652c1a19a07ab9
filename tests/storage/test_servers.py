"""Stores behind a network: who wins, what is damaged, what if they go away."""

import multiprocessing
import os
import signal
import socket
import threading
import time

import jax.numpy as jnp
import numpy as np
import pytest

import flaxckpt
from flaxckpt import errors
from tests.helpers import seams, slow, store_servers, strategies
from tests.helpers.files import flip_bit

SERVERS = ("moto", "seaweed")
QUICK = flaxckpt.StoreOptions(deadline_secs=3, retries=1)


def state(step, size=16):
    return {"w": jnp.full((size,), float(step)), "step": step}


@pytest.fixture
def reached_by():
    """Sets options for buckets, and forgets them in the end."""
    known = []

    def reached(url, options):
        known.append(url)
        flaxckpt.set_store_options(url, options)

    yield reached
    for url in known:
        flaxckpt.set_store_options(url, None)


# ---- two writers ------------------------------------------------------------------


def write_rounds(url, mark, rounds, barrier, results):
    """Saves one step a round as soon as everybody is there."""
    won = []
    for step in range(rounds):
        ckpt = flaxckpt.Checkpointer(url)
        barrier.wait(60)
        try:
            ckpt.save(step, {"mark": mark, "step": step}).wait()
        except errors.CheckpointExistsError:
            continue
        won.append(step)
    results.put((mark, won))


@pytest.mark.slow
@pytest.mark.parametrize("kind", slow.all_but(SERVERS, ["moto"]))
def test_exactly_one_of_two_writers_of_step_wins(store_path, kind):
    url, rounds = str(store_path(kind)), 10
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(2), context.Queue()
    writers = [
        context.Process(target=write_rounds, args=(url, m, rounds, barrier, results))
        for m in (1, 2)
    ]
    for writer in writers:
        writer.start()
    won = dict(results.get(timeout=300) for _ in writers)
    for writer in writers:
        writer.join(60)
    assert sorted(won[1] + won[2]) == list(range(rounds))
    with flaxckpt.Checkpointer(url) as ckpt:
        assert ckpt.steps() == list(range(rounds))
        for mark, steps in won.items():
            for step in steps:
                assert ckpt.restore(step=step) == {"mark": mark, "step": step}


# ---- damage -----------------------------------------------------------------------


@pytest.mark.parametrize("codec", ["none", "zstd"])
@pytest.mark.parametrize("kind", ["memory", "moto"])
def test_finds_flipped_bit_and_restores_older_step(store_path, kind, codec):
    path = store_path(kind)
    values = np.random.default_rng(0).standard_normal(4096).astype(np.float32)
    options = flaxckpt.ArrayLayout(codec=codec)
    with flaxckpt.Checkpointer(path, layout=options) as ckpt:
        for step in (1, 2):
            ckpt.save(step, {"w": values * step}).wait()
        [largest] = sorted(
            (path / "2/state").rglob("*"), key=lambda p: len(p.read_bytes())
        )[-1:]
        flip_bit(largest, bit=4)
        assert not ckpt.verify(2).ok
        strategies.assert_same({"w": values}, ckpt.restore())
        assert list(ckpt.damaged()) == [2]
        assert ckpt.verify(1).ok


# ---- servers that go away ---------------------------------------------------------


@pytest.mark.slow
def test_killed_server_fails_only_current_save(tmp_path, monkeypatch, reached_by):
    server = store_servers.seaweed(tmp_path)
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    options = flaxckpt.StoreOptions(deadline_secs=8, retries=1)
    reached_by(f"s3://{server.bucket}", options)
    url = f"s3://{server.bucket}/run"
    large = {"w": np.arange(2**20, dtype=np.float32)}
    server.start()
    try:
        ckpt = flaxckpt.Checkpointer(url)
        ckpt.save(1, state(1)).wait()
        writing, killed = threading.Event(), threading.Event()
        real = seams.current("commit_marker.write_new")

        def write_new(path, content):
            real(path, content)
            if "/d/" in path.key:
                writing.set()
                killed.wait(30)

        seams.replace(monkeypatch, "commit_marker.write_new", write_new)
        begun = time.monotonic()
        handle = ckpt.save(2, large)
        assert writing.wait(30)
        server.kill()
        killed.set()
        with pytest.raises(errors.SaveFailedError, match="could not be saved"):
            handle.wait()
        assert time.monotonic() - begun < 60
        server.start()
        assert flaxckpt.Checkpointer(url, read_only=True).steps() == [1]
        ckpt.save(2, large).wait()
        ckpt.save(3, state(3)).wait()
        assert ckpt.steps() == [1, 2, 3]
        strategies.assert_same(state(1), ckpt.restore(step=1))
        strategies.assert_same(large, ckpt.restore(step=2))
    finally:
        server.kill()


def test_stopped_server_raises_error_in_time(tmp_path, monkeypatch, reached_by):
    server = store_servers.moto(tmp_path)
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    reached_by(f"s3://{server.bucket}", QUICK)
    server.start()
    try:
        ckpt = flaxckpt.Checkpointer(f"s3://{server.bucket}/run")
        ckpt.save(1, state(1)).wait()
        server.signal(signal.SIGSTOP)
        with pytest.raises(errors.StoreError, match=r"within 3 s.*deadline_secs"):
            ckpt.restore(state(0))
        with pytest.raises(errors.CheckpointError):
            ckpt.save(2, state(2)).wait()
        server.signal(signal.SIGCONT)
        ckpt.save(2, state(2), on_exists="overwrite").wait()
        strategies.assert_same(state(2), ckpt.restore())
        ckpt.close()
    finally:
        server.kill()


@pytest.mark.parametrize("how", ["refuses", "is silent"])
def test_dead_endpoint_raises_error_in_time(monkeypatch, reached_by, how):
    for name, value in store_servers.CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    with socket.socket() as dead:
        dead.bind(("127.0.0.1", 0))
        if how == "is silent":
            dead.listen(1)
        endpoint = f"http://127.0.0.1:{dead.getsockname()[1]}"
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
        reached_by("s3://nowhere", QUICK)
        for act in (
            lambda: flaxckpt.save("s3://nowhere/c", state(1)),
            lambda: flaxckpt.load("s3://nowhere/c"),
            lambda: flaxckpt.Checkpointer("s3://nowhere/run"),
        ):
            begun = time.monotonic()
            with pytest.raises(errors.CheckpointError, match="s3://nowhere") as info:
                act()
            assert time.monotonic() - begun < 30, "TensorStore alone takes 93 s"
            assert endpoint in str(info.value)
            assert len(str(info.value).splitlines()) < 15


# ---- how stores are reached -------------------------------------------------------


def test_takes_options_from_environment_and_caller(store_path, monkeypatch, reached_by):
    path = store_path("moto")
    endpoint = os.environ["AWS_ENDPOINT_URL"]
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", endpoint)  # counts before the other
    flaxckpt.save(path / "a", state(1))
    monkeypatch.delenv("AWS_ENDPOINT_URL_S3")
    reached_by("s3://", flaxckpt.StoreOptions(endpoint=endpoint, region="us-east-1"))
    strategies.assert_same(state(1), flaxckpt.load(str(path / "a")))


def test_error_names_missing_bucket(store_path):
    store_path("moto")
    with pytest.raises(errors.CheckpointError, match="no-such-bucket"):
        flaxckpt.load("s3://no-such-bucket/c")
    with pytest.raises(errors.CheckpointError, match="no-such-bucket"):
        flaxckpt.save("s3://no-such-bucket/c", state(1))


def test_reads_and_writes_on_google_cloud_storage(gcs):
    path = flaxckpt.Checkpointer(f"gs://{gcs}/dir", read_only=True).directory
    (path / "a b/ü").write_bytes(b"x")
    (path / "c").write_bytes(b"y" * 100)
    assert [p.key for p in path.rglob("*")] == ["dir/a b/ü", "dir/c"]
    assert (path / "c").read_bytes() == b"y" * 100
    (path / "c").unlink()
    assert not (path / "c").exists()
    flaxckpt.save(path / "state", state(1))
    strategies.assert_same(state(1), flaxckpt.load(path / "state"))
    assert flaxckpt.verify(f"gs://{gcs}/dir/state").ok


@pytest.fixture
def gcs(tmp_path, monkeypatch):
    """A bucket of the emulator, which does not keep conditions: see `test_commit`."""
    with store_servers.gcs(tmp_path) as (url, bucket):
        monkeypatch.setenv("TENSORSTORE_GCS_HTTP_URL", url)
        monkeypatch.setenv("GOOGLE_AUTH_TOKEN_FOR_TESTING", "x")
        yield bucket
