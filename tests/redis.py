"""A real Redis for tests: on a free port, in its own folder, without persistence unless arguments enable it."""

from __future__ import annotations

import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

START_TIMEOUT_S = 60.0


class RedisServer:
    """A redis-server that can be killed and started again with its files."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self.port = free_port()
        self._folder, self._arguments = folder, arguments
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start the process, and return once it accepts connections."""
        command = ["redis-server", "--bind", "127.0.0.1", "--port", str(self.port), "--dir", str(self._folder)]
        self._process = subprocess.Popen(
            [*command, "--save", "", *self._arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        output = []
        for line in self._process.stdout:
            output.append(line)
            if b"Ready to accept connections" in line:
                return
        raise AssertionError(b"".join(output).decode())

    def hang(self) -> None:
        """Suspend the process until `resume`."""
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """Kill the process with SIGKILL."""
        self._process.kill()
        self._process.wait(timeout=START_TIMEOUT_S)
        self._process.stdout.close()


def free_port() -> int:
    """Return a free port below those that Linux gives to connections, one of which could take it in the meantime."""
    while True:
        port = 15_000 + secrets.randbelow(17_000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


@contextmanager
def running_redis(*arguments: str):
    """Yield a running redis-server; skip the test if none is installed."""
    if shutil.which("redis-server") is None:
        pytest.skip("NOT TESTED: redis-server is not installed; run: apt-get install redis-server")
    with tempfile.TemporaryDirectory(prefix="ssd-redis-") as folder:
        server = RedisServer(Path(folder), *arguments)
        server.start()
        try:
            yield server
        finally:
            server.kill()
