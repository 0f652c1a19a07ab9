"""A store that restarts, or whose answers are lost, costs time and nothing else."""

import contextlib
import socket
import threading
import time

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState

import flaxckpt
from flaxckpt import errors
from tests.helpers import faulty_store as faulty
from tests.helpers import run_files, seams, store_servers, strategies

OUTAGE_SECS = 1.0
LAYOUTS = {
    "raw": flaxckpt.ArrayLayout(),
    "compressed": flaxckpt.ArrayLayout(codec="zstd"),
}


class Proxy:
    """Stands before a server, and may be away, or lose its answers.

    Attributes:
        url: Where it listens.
        lost: How many answers were lost.
    """

    def __init__(self, server):
        host, port = server.url.removeprefix("http://").split(":")
        self._server = host, int(port)
        self._open = set()
        self._guard = threading.Lock()
        self._lost = None
        self._threads = []
        self._port = 0
        self.lost = 0
        self.come_back()
        self.url = f"http://127.0.0.1:{self._port}"

    def _run(self, target, *args):
        thread = threading.Thread(target=target, args=args)
        self._threads.append(thread)
        thread.start()

    def _accept(self, listener):
        with contextlib.suppress(OSError), listener:
            while True:
                client, _ = listener.accept()
                server = socket.create_connection(self._server)
                with self._guard:
                    self._open |= {client, server}
                state = {}
                self._run(self._pass, client, server, self._asks, state)
                self._run(self._pass, server, client, self._answers, state)

    def _pass(self, one, other, look, state):
        with one:
            with contextlib.suppress(OSError):
                while content := one.recv(2**16):
                    look(content, state)
                    other.sendall(content)
            for each in (one, other):
                with contextlib.suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)
            with self._guard:
                self._open.discard(one)

    def _asks(self, content, state):
        if self._lost is not None and content.startswith((b"PUT ", b"DELETE ")):
            key = content.split(b" ")[1]
            with self._guard:
                state["lose"] = key not in self._lost
                self._lost.add(key)

    def _answers(self, content, state):
        if state.get("lose") and b" 100 " not in content[:16]:
            self.lost += 1
            raise OSError("the answer is lost")

    @contextlib.contextmanager
    def losing(self):
        """Loses the first answer to each write and deletion of a key."""
        self._lost = set()
        yield
        self._lost = None

    def go_away(self):
        """Refuses connections, and cuts off those that there are."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        with self._guard:
            for each in self._open:
                with contextlib.suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        self._threads.clear()

    def come_back(self):
        """Accepts connections again."""
        self._listener = socket.create_server(("127.0.0.1", self._port))
        self._port = self._listener.getsockname()[1]
        self._run(self._accept, self._listener)

    def restart(self):
        """Goes away, and comes back after a second, behind the caller."""
        self.go_away()
        timer = threading.Timer(OUTAGE_SECS, self.come_back)
        timer.start()
        return timer


@pytest.fixture
def proxy(tmp_path_factory, monkeypatch):
    server = store_servers.running("moto", tmp_path_factory)
    # So that a few repetitions end long before an outage does.
    seams.replace(monkeypatch, "requests.first_pause_secs", 0.01)
    seams.replace(monkeypatch, "requests.longest_pause_secs", 0.05)
    seams.replace(monkeypatch, "requests.own_retries", {"max_retries": 0})
    made = Proxy(server)
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_ENDPOINT_URL", made.url)
    yield made
    made.go_away()


def state(step):
    return {"w": np.full(3000, float(step), np.float32), "n": step, "t": "text"}


# ---- restarts ------------------------------------------------------------------------


@pytest.mark.parametrize("name", LAYOUTS)
def test_saves_and_restores_survive_store_restart(proxy, name):
    url = f"s3://{store_servers.BUCKET}/restarts-{name}"
    ckpt = flaxckpt.Checkpointer(url, layout=LAYOUTS[name])
    ckpt.save(1, state(1), metrics={"loss": 1.0}).wait()
    for act in (
        lambda: ckpt.save(2, state(2)).wait(),
        lambda: strategies.assert_same(state(2), ckpt.restore()),
        lambda: ckpt.delete(1),
    ):
        timer = proxy.restart()
        act()
        timer.join()
    assert ckpt.steps() == [2]
    assert ckpt.damaged() == {}
    assert ckpt.verify(2).ok


def test_save_waits_for_store_to_come_back(proxy, monkeypatch):
    url = f"s3://{store_servers.BUCKET}/restarts-during"
    layout = flaxckpt.ArrayLayout(chunk_bytes=2**10)
    ckpt = flaxckpt.Checkpointer(url, layout=layout)
    ckpt.save(1, state(1)).wait()
    timers: list[threading.Timer] = []
    real = seams.current("locks.confirm")

    def confirm(lock):
        if not timers:
            timers.append(proxy.restart())  # just before the marker is written
        real(lock)

    seams.replace(monkeypatch, "locks.confirm", confirm)
    ckpt.save(2, state(2)).wait()
    timers[0].join()
    ckpt.close()
    strategies.assert_same(state(2), flaxckpt.load(url))


@pytest.mark.parametrize("name", LAYOUTS)
def test_repeating_successful_requests_does_no_harm(proxy, name):
    url = f"s3://{store_servers.BUCKET}/lost-{name}"
    ckpt = flaxckpt.Checkpointer(url, layout=LAYOUTS[name])
    with proxy.losing():
        ckpt.save(1, state(1)).wait()
        ckpt.add_metrics(1, {"loss": 1.0})
        ckpt.pin(1)
        with pytest.raises(errors.CheckpointExistsError):
            ckpt.save(1, state(5))
        ckpt.save(2, state(2)).wait()
        ckpt.save(2, state(3), on_exists="overwrite").wait()
        ckpt.unpin(1)
        ckpt.delete(1)
    assert proxy.lost > 5
    assert ckpt.steps() == [2]
    assert ckpt.verify(2).ok
    strategies.assert_same(state(3), ckpt.restore())
    found = ckpt.directory.keys()
    assert not [key for key in found if key.endswith(run_files.LOCK)]
    ckpt.close()


def test_one_of_two_writers_wins_despite_lost_answers(proxy):
    url = f"s3://{store_servers.BUCKET}/lost-race"
    barrier, won = threading.Barrier(2), []

    def write(text):
        ckpt = flaxckpt.Checkpointer(url)
        barrier.wait()
        with contextlib.suppress(errors.CheckpointExistsError):
            ckpt.save(1, {"w": np.full(9, 1.0), "t": text}).wait()
            won.append(text)

    with proxy.losing():
        threads = [threading.Thread(target=write, args=(text,)) for text in "ab"]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(won) == 1
    assert flaxckpt.load(url)["t"] == won[0]


def test_save_fails_soon_if_store_never_answers(tmp_path, monkeypatch):
    seams.replace(monkeypatch, "requests.first_pause_secs", 1e-3)
    for name, value in store_servers.CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    with socket.socket() as dead:
        dead.bind(("127.0.0.1", 0))
        monkeypatch.setenv(
            "AWS_ENDPOINT_URL", f"http://127.0.0.1:{dead.getsockname()[1]}"
        )
        pauses = []
        monkeypatch.setattr(time, "sleep", pauses.append)
        with pytest.raises(errors.SaveFailedError, match="check bucket, region"):
            flaxckpt.save("s3://typo/run", state(1))
    assert len([pause for pause in pauses if pause < 1]) == 4


# ---- what is raised ------------------------------------------------------------------


def train_state():
    params = {"w": jnp.ones(3)}
    return TrainState.create(apply_fn=None, params=params, tx=optax.adam(1e-3))


SAVES = {
    "save": lambda ckpt, path: ckpt.save(2, state(2)),
    "skip": lambda ckpt, path: ckpt.save(2, state(2), on_exists="skip"),
    "overwrite": lambda ckpt, path: ckpt.save(1, state(2), on_exists="overwrite"),
    "params only": lambda ckpt, path: ckpt.save_params_only(2, train_state()),
    "function": lambda ckpt, path: flaxckpt.save(path / "alone", state(2)),
    "async": lambda ckpt, path: flaxckpt.save_async(path / "alone", state(2)),
    "open": lambda ckpt, path: flaxckpt.Checkpointer(path),
}


@pytest.mark.parametrize("name", SAVES)
def test_save_to_unreachable_store_raises_documented_error(monkeypatch, name):
    path = faulty.new_path("restarts-raised")
    ckpt = flaxckpt.Checkpointer(path)
    ckpt.save(1, state(1)).wait()
    with (
        faulty.faulty(path, last=0),
        pytest.raises(errors.SaveFailedError, match="network is gone") as told,
    ):
        SAVES[name](ckpt, path)
    assert len(str(told.value).splitlines()) < 15
    ckpt.save(2, state(2)).wait()
    ckpt.close()
    assert ckpt.steps() == [1, 2]
