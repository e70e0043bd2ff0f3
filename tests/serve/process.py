"""A server in a process of its own: started, watched, stopped, and never left behind."""

from __future__ import annotations

import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import TracebackType

import httpx

_ADDRESS = re.compile(r"ready on (http://\S+);")


class ServerProcess:
    """A child that runs ``arguments`` with this Python; standard output and error are gathered as they come."""

    def __init__(self, *arguments: str) -> None:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        self.child = subprocess.Popen(
            [sys.executable, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
            text=True,
            env=environment,
        )
        self.out: list[str] = []
        self.err: list[str] = []
        self._lines: queue.Queue[str] = queue.Queue()
        for pipe, lines in ((self.child.stdout, self.out), (self.child.stderr, self.err)):
            threading.Thread(target=self._gather, args=(pipe, lines), daemon=True).start()
        self.url = ""

    def _gather(self, pipe: object, lines: list[str]) -> None:
        for line in pipe:  # type: ignore[attr-defined]
            lines.append(line.rstrip("\n"))
            self._lines.put(line)

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if self.child.poll() is None:
            self.child.kill()
        self.child.wait(10)

    def wait_until_ready(self, seconds: float = 60.0) -> str:
        """The address that the server printed."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if self.child.poll() is not None:
                raise AssertionError(f"the server ended with {self.child.returncode}: {self.out} {self.err}")
            try:
                found = _ADDRESS.search(self._lines.get(timeout=0.1))
            except queue.Empty:
                continue
            if found:
                self.url = found[1]
                return self.url
        raise AssertionError(f"the server is not ready: {self.out} {self.err}")

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal to the child."""
        self.child.send_signal(number)

    def wait(self, seconds: float = 10.0) -> int:
        """The exit code; fails if the child goes on for longer."""
        return self.child.wait(seconds)


def scripted(*arguments: str) -> ServerProcess:
    """A scripted server; see scripted_server.py for its arguments."""
    return ServerProcess(str(Path(__file__).with_name("scripted_server.py")), *arguments)


def listening_port(process: ServerProcess, seconds: float = 30.0) -> int:
    """The port that a child listens on before it has printed anything."""
    import psutil

    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        for connection in psutil.Process(process.child.pid).net_connections("tcp4"):
            if connection.status == psutil.CONN_LISTEN:
                return int(connection.laddr.port)
        time.sleep(0.05)
    raise AssertionError("the child does not listen")


def get(url: str, path: str) -> httpx.Response:
    """One GET on a connection of its own."""
    return httpx.get(url + path, timeout=10)
