"""Start and stop of a server process (B86, B87, B88): phases, signals, exit codes, what is printed."""

from __future__ import annotations

import contextlib
import json
import shlex
import signal
import socket
import threading
import time

import httpx
import pytest

from neoserve.api.server import ServerOptions, bind
from neoserve.types.errors import ConfigurationError

from .api_harness import MODEL
from .process import ServerProcess, get, listening_port, scripted

ENDLESS = {"model": MODEL, "prompt": "p", "max_tokens": 240, "ignore_eos": True, "stream": True}


class Stream:
    """A streamed completion read in a thread."""

    def __init__(self, url: str, **fields: object) -> None:
        self.text = ""
        self.begun = threading.Event()
        self._url = url
        self._body = {**ENDLESS, **fields}
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        # A process that ends at once cuts its connections; what came until then is what counts.
        request = httpx.stream("POST", f"{self._url}/v1/completions", json=self._body, timeout=30)
        with contextlib.suppress(httpx.RemoteProtocolError), request as response:
            for piece in response.iter_text():
                self.text += piece
                self.begun.set()

    def end(self) -> str:
        """The whole text, once the server has ended it."""
        self._thread.join(20)
        assert not self._thread.is_alive()
        return self.text


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_idle_server_stops_with_exit_code_0(number: signal.Signals) -> None:
    with scripted("0", "5") as process:
        url = process.wait_until_ready()
        assert get(url, "/health").status_code == 200
        process.signal(number)
        assert process.wait(5) == 0
        with pytest.raises(httpx.ConnectError):
            get(url, "/health")
    assert "Traceback" not in "\n".join(process.err)


def test_what_is_printed_at_the_start() -> None:
    with scripted("0", "5") as process:
        url = process.wait_until_ready()
        deadline = time.monotonic() + 5
        while len(process.out) < 3 and time.monotonic() < deadline:
            time.sleep(0.01)
        summary, ready, command = process.out
        assert summary == "neoserve: a scripted model"
        assert url in ready
        words = shlex.split(command)
        assert words[:2] == ["curl", f"{url}/v1/chat/completions"]
        body = json.loads(words[words.index("-d") + 1])
        answer = httpx.post(words[1], json=body)
        assert answer.status_code == 200
        assert answer.json()["choices"][0]["message"]["content"]


def test_running_requests_are_finished_and_new_ones_refused() -> None:
    with scripted("0.01", "20") as process:
        url = process.wait_until_ready()
        streams = [Stream(url, max_tokens=150) for _ in range(4)]
        for stream in streams:
            assert stream.begun.wait(10)
        process.signal(signal.SIGTERM)
        time.sleep(0.2)
        refused = httpx.post(f"{url}/v1/completions", json={"model": MODEL, "prompt": "p"})
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "shutting_down"
        assert get(url, "/health").status_code == 503
        assert get(url, "/health/live").status_code == 200
        for stream in streams:
            assert stream.end().endswith("data: [DONE]\n\n")
        assert process.wait(10) == 0


def test_what_outlasts_the_drain_ends_with_an_error_event() -> None:
    with scripted("0.1", "0.3") as process:
        stream = Stream(process.wait_until_ready())
        assert stream.begun.wait(10)
        start = time.monotonic()
        process.signal(signal.SIGTERM)
        assert process.wait(5) == 0
        assert time.monotonic() - start < 0.3 + 3
        text = stream.end()
    last = json.loads(text.strip().split("\n\n")[-1].removeprefix("data: "))
    assert last["error"]["code"] == "aborted"
    assert "[DONE]" not in text


def test_a_step_that_does_not_end_does_not_hold_up_the_stop() -> None:
    """Native code cannot be interrupted: the process ends without it, as after any stop that was asked for."""
    with scripted("60", "0.2") as process:
        url = process.wait_until_ready()
        Stream(url)
        deadline = time.monotonic() + 10
        while 'num_running_reqs{model_name="scripted"} 1' not in get(url, "/metrics").text:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        start = time.monotonic()
        process.signal(signal.SIGTERM)
        assert process.wait(20) == 0
        assert time.monotonic() - start < 0.2 + 12
    assert "Traceback" not in "\n".join(process.err)


def test_a_second_signal_ends_at_once() -> None:
    with scripted("0.1", "60") as process:
        stream = Stream(process.wait_until_ready())
        assert stream.begun.wait(10)
        process.signal(signal.SIGTERM)
        time.sleep(0.3)
        assert process.child.poll() is None
        process.signal(signal.SIGTERM)
        assert process.wait(2) == 128 + signal.SIGTERM


def test_a_loading_server_is_alive_but_not_ready_and_stops_at_once() -> None:
    with scripted("load", "60") as process:
        url = f"http://127.0.0.1:{listening_port(process)}"
        health = get(url, "/health")
        assert health.status_code == 503
        assert health.json()["error"]["code"] == "model_loading"
        assert get(url, "/health/live").json() == {"status": "loading"}
        process.signal(signal.SIGTERM)
        assert process.wait(2) == 0


def test_a_port_in_use_is_told_in_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with ServerProcess("-m", "neoserve", "serve", "no-such-model", "--port", str(port)) as process:
            assert process.wait(20) == 1
            time.sleep(0.2)
            (line,) = process.err
            assert str(port) in line
            assert "--port" in line


def test_a_bad_model_is_told_in_one_line() -> None:
    with ServerProcess("-m", "neoserve", "serve", "/no/such/model.gguf", "--port", "0") as process:
        assert process.wait(20) == 1
        time.sleep(0.2)
        (line,) = process.err
        assert line.startswith("neoserve: ")
        assert "/no/such/model.gguf" in line
        assert process.out == []


def test_nothing_is_left_behind_when_the_parent_is_killed() -> None:
    """B89: one process, no shared memory, no socket files."""
    with scripted("0", "5") as process:
        process.wait_until_ready()
        import psutil

        assert psutil.Process(process.child.pid).children(recursive=True) == []
        process.child.kill()
        process.wait()


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"port": 70000}, "port"),
        ({"port": -1}, "port"),
        ({"log_level": "loud"}, "log_level"),
        ({"drain_seconds": -1.0}, "drain"),
    ],
)
def test_bad_options_are_refused_by_name(fields: dict[str, object], name: str) -> None:
    with pytest.raises(ConfigurationError, match=name):
        ServerOptions(**fields)  # type: ignore[arg-type]


@pytest.mark.parametrize("host", ["no.such.host.invalid", "203.0.113.7"])
def test_an_address_that_is_not_ours_is_refused(host: str) -> None:
    with pytest.raises(ConfigurationError, match=host):
        bind(host, 0)


def test_help_is_fast_because_nothing_heavy_is_imported() -> None:
    code = (
        "import sys; from neoserve.cli.main import main; code = main(['serve', '--help']); "
        "heavy = {'numpy', 'fastapi', 'uvicorn', 'tokenizers', 'jinja2', 'rich', 'huggingface_hub', 'openai'};"
        "print(sorted(heavy & set(sys.modules)), code)"
    )
    with ServerProcess("-c", code) as process:
        assert process.wait(20) == 0
        time.sleep(0.2)
    assert process.out[-1] == "[] 0"
