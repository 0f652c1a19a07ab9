"""News and values without jax; and Ctrl-C, which ends the server at any read."""

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import flaxckpt
from tests.helpers import store_servers
from tests.helpers.ui_server import send, serving

pytest.importorskip("starlette", reason="starlette is missing")
pytest.importorskip("uvicorn", reason="uvicorn is missing")


_SOON_SECS = 45
"""A limit for what takes a second at most; reads of a stopped store take a minute."""


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    root = tmp_path_factory.mktemp("ui")
    with flaxckpt.Checkpointer(root / "runs" / "one") as run:
        for step in (1, 2):
            run.save(
                step, {"w": np.full(3, step, "float32"), "b": jnp.ones(2, "bfloat16")}
            )
    (root / "runs" / "wanted.json").write_text('{"w": "float32[3]"}')
    with serving(root / "runs") as server:
        yield server


def children(process):
    listed = Path(f"/proc/{process.pid}/task/{process.pid}/children").parents[1]
    texts = [(task / "children").read_text() for task in listed.iterdir()]
    return [int(child) for text in texts for child in text.split()]


def test_plans_again_after_planning_process_was_killed(served):
    """Such as by the kernel, for its memory; idle ones end by themselves."""
    for _ in range(2):
        planned = served.ask("/plan/result?run=one&step=2&into=one")
        assert "would succeed" in planned.text
        [child] = children(served.process)
        os.kill(child, signal.SIGKILL)


def test_news_contain_version_and_text(served):
    news = json.loads(served.ask("/news?run=one").text)
    assert set(news) == {"version", "text", "is_bad"}
    assert served.ask("/news?run=two").status == 404


def test_reads_values_and_plans_without_jax(served):
    """It takes 120 MB and a second, of a server that runs beside the training."""
    planned = served.ask("/plan/result?run=one&step=2&into=one")
    assert "would succeed" in planned.text
    refused = served.ask("/plan/result?run=one&step=2&into=one&drop=x")
    assert (refused.status, "matches no leaf" in refused.text) == (400, True)
    assert "wanted.json" in served.ask("/plan?run=one").text
    for leaf in ("w", "b"):
        shown = served.ask(f"/leaves/leaf?run=one&step=2&leaf={leaf}")
        assert "norm" in shown.text
    compared = served.ask("/compare/result?run=one&a=1&b=2")
    assert "1 leaf changed" in compared.text
    libraries = Path(f"/proc/{served.process.pid}/maps").read_text()
    assert "numpy" in libraries
    assert "jaxlib" not in libraries


@pytest.fixture
def slow(tmp_path, monkeypatch):
    """A page on a run in a store of its own, and the store's server."""
    server = store_servers.moto(tmp_path)
    try:
        server.start()
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        with flaxckpt.Checkpointer(f"s3://{server.bucket}/run") as run:
            run.save(1, {"w": np.ones(1000)}).wait()
        with serving(f"s3://{server.bucket}/run") as served:
            assert served.ask("/run?run=run").status == 200
            yield served, server
    finally:
        server.kill()


def assert_ends(served):
    """Ctrl-C ends the server, quietly, while the store does not answer."""
    served.process.send_signal(signal.SIGINT)
    try:
        served.process.wait(timeout=_SOON_SECS)
    except subprocess.TimeoutExpired:
        pytest.fail("Ctrl-C did not end the server")


@pytest.mark.slow
def test_ctrl_c_ends_server_during_read(slow):
    served, store = slow
    assert served.cookie
    store.signal(signal.SIGSTOP)
    with send(served, "/leaves/leaf?run=run&step=1&leaf=w") as asked:
        asked.settimeout(2)
        with pytest.raises(TimeoutError):
            asked.recv(1)  # it is reading
        assert_ends(served)


@pytest.mark.slow
def test_ctrl_c_ends_server_during_verification(slow):
    served, store = slow
    store.signal(signal.SIGSTOP)
    assert "Verifying" in served.ask("/verify/start?run=run&step=all").text
    assert "Verifying" in served.ask("/verify/status?run=run").text
    assert_ends(served)


@pytest.mark.slow
def test_stopped_verification_marks_nothing_as_verified(slow):
    served, store = slow
    store.signal(signal.SIGSTOP)
    assert "Verifying step 1" in served.ask("/verify/start?run=run&step=1").text
    second = served.ask("/verify/start?run=run&step=all").text
    assert "run is being verified" in second
    assert "Stopping" in served.ask("/verify/stop?run=run").text
    store.signal(signal.SIGCONT)
    end = time.monotonic() + _SOON_SECS
    while "Verifying" in (shown := served.ask("/verify/status?run=run").text):
        assert time.monotonic() < end
        time.sleep(0.05)
    assert "Not verified" in shown
    assert "outcome good" not in shown
    assert "check verified" not in shown
