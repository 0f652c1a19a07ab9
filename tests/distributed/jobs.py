"""Starts jobs of several processes, and sees that they end."""

import asyncio
import contextlib
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tests.helpers.files import free_port

PROGRAM = Path(__file__).with_name("program.py")
TIMEOUT_SECS = 300


class Job:
    """Processes of one job, each of which does the scenarios `names`.

    `prints_stacks`: a process that aborts prints its Python stacks. Not for a job that
    jax may end: stacks of threads that run cannot be read safely, and reading them has
    turned an abort into a segmentation fault. `delay_secs`: how long each message
    between process 0 and the others is under way.
    """

    def __init__(
        self,
        names,
        count,
        directory,
        prints_stacks=False,
        preload="",
        delay_secs=0,
        **given,
    ):
        port = free_port()
        ports = [port] * count
        if delay_secs:
            ports[1:] = [relay(port, delay_secs)] * (count - 1)
        variables = {
            "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
            "JAX_PLATFORMS": "cpu",
            "PYTHONFAULTHANDLER": "1" if prints_stacks else "",
            "LD_PRELOAD": str(preload),
        }
        command = [sys.executable, PROGRAM, names]
        rest = [str(directory), json.dumps(given)]
        self.processes = [
            subprocess.Popen(
                [*command, str(rank), str(count), str(port), *rest],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env=os.environ | variables,
            )
            for rank, port in enumerate(ports)
        ]

    def __enter__(self):
        return self

    def __exit__(self, *error):
        for process in self.processes:
            process.kill()
            process.communicate()

    def ends(self, timeout_secs=TIMEOUT_SECS):
        """(exit code, what it said, what it complained of) of each.

        Those that have not ended in time are killed, and so are the others when one
        has failed and they do not notice.
        """
        deadline, has_failed = time.monotonic() + timeout_secs, False
        while any(process.poll() is None for process in self.processes):
            if not has_failed and any(p.poll() == 1 for p in self.processes):
                has_failed = True
                deadline = min(deadline, time.monotonic() + 5)
            if time.monotonic() > deadline:
                break
            time.sleep(0.02)
        for process in self.processes:
            process.kill()
        said = [process.communicate() for process in self.processes]
        return [
            (process.returncode, *texts)
            for process, texts in zip(self.processes, said, strict=True)
        ]


def relay(port, secs):
    """Returns a port whose bytes reach `port` `secs` later, and the answers as well."""
    loop = asyncio.new_event_loop()

    async def pass_on(reader, writer):
        with contextlib.closing(writer), contextlib.suppress(OSError):
            while content := await reader.read(2**16):
                loop.call_later(secs, writer.write, content)
            await asyncio.sleep(secs)

    async def connect(reader, writer):
        try:
            there, back = await asyncio.open_connection("127.0.0.1", port)
        except OSError:  # not there yet: the process tries again
            writer.close()
            return
        await asyncio.gather(pass_on(reader, back), pass_on(there, writer))

    server = loop.run_until_complete(asyncio.start_server(connect, "127.0.0.1", 0))
    threading.Thread(target=loop.run_forever, daemon=True).start()
    return server.sockets[0].getsockname()[1]


def run(names, count, directory, **given):
    """What the processes of a job have found: scenario -> what each one said of it."""
    directory.mkdir(parents=True, exist_ok=True)
    with Job(names, count, directory, prints_stacks=True, **given) as job:
        ends = job.ends()
    complaints = "\n".join(
        f"process {rank}: {code}\n{err[-3000:]}"
        for rank, (code, _, err) in enumerate(ends)
        if code
    )
    assert not complaints, complaints
    said = [rows(out) for _, out, _ in ends]
    return dict(zip(names.split(","), zip(*said, strict=True), strict=True))


def rows(out):
    """What a process has said; gloo says something, too."""
    return [json.loads(row) for row in out.splitlines() if row.startswith("{")]


def make_certificate(directory, *options, days=2):
    """A file with a certificate and its key; it has expired with negative days."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl, which makes a certificate, is missing")
    key, certificate = directory / "key", directory / "certificate"
    command = "openssl req -x509 -newkey rsa:2048 -nodes"
    rest = ["-subj", "/CN=job", "-keyout", key, "-out", certificate, *options]
    sign = f"openssl x509 -signkey {key} -in {certificate} -out {certificate}"
    for line in ([*command.split(), *rest], [*sign.split(), "-days", f"{days}"]):
        subprocess.run(line, check=True, capture_output=True)
    both = directory / "both.pem"
    both.write_bytes(key.read_bytes() + certificate.read_bytes())
    return str(both)
