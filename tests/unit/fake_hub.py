"""A model hub on 127.0.0.1 with the few routes that huggingface_hub asks for, and switches for its refusals."""

from __future__ import annotations

import hashlib
import json
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

COMMIT = "a" * 40


@dataclass
class FakeHub:
    """``files`` maps repository -> {path: content}. ``refuse`` maps repository -> (status, X-Error-Code).

    ``requests`` collects "METHOD path"; ``tokens`` the bearer tokens that came.
    """

    files: dict[str, dict[str, bytes]]
    refuse: dict[str, tuple[int, str]] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)
    tokens: set[str] = field(default_factory=set)

    def __enter__(self) -> FakeHub:
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                hub.answer(self, body=True)

            def do_HEAD(self) -> None:
                hub.answer(self, body=False)

            def log_message(self, *args: object) -> None:
                return None

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True)
        self.thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Ends the server; may be called twice."""
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()

    @property
    def endpoint(self) -> str:
        """For HF_ENDPOINT."""
        return f"http://127.0.0.1:{self.server.server_address[1]}"

    def answer(self, handler: BaseHTTPRequestHandler, *, body: bool) -> None:
        """One request."""
        path = unquote(urlsplit(handler.path).path)
        self.requests.append(f"{handler.command} {path}")
        self.tokens.add(handler.headers.get("authorization", "").removeprefix("Bearer "))
        repository, rest = self._split(path)
        if repository in self.refuse:
            status, code = self.refuse[repository]
            return self._send(handler, status, b"{}", body, {"X-Error-Code": code} if code else {})
        if repository not in self.files:
            return self._send(
                handler, 404, b'{"error": "Repository not found"}', body, {"X-Error-Code": "RepoNotFound"}
            )
        files = self.files[repository]
        if rest[0] == "resolve":
            return self._file(handler, files, rest, body)
        if len(rest) > 1 and rest[1] not in ("main", COMMIT):
            return self._send(handler, 404, b"{}", body, {"X-Error-Code": "RevisionNotFound"})
        if rest[0] == "tree":
            listed = [self._tree_entry(name, content) for name, content in files.items()]
            return self._send(handler, 200, json.dumps(listed).encode(), body)
        siblings = [{"rfilename": name, "size": len(content)} for name, content in files.items()]
        info = {"_id": "0", "id": repository, "modelId": repository, "sha": COMMIT, "siblings": siblings, "tags": []}
        return self._send(handler, 200, json.dumps(info).encode(), body)

    @staticmethod
    def _split(path: str) -> tuple[str, list[str]]:
        parts = path.strip("/").split("/")
        if parts[:2] == ["api", "models"]:
            parts = parts[2:]
        return "/".join(parts[:2]), parts[2:] or [""]

    @staticmethod
    def _tree_entry(name: str, content: bytes) -> dict[str, object]:
        return {"type": "file", "path": name, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}

    def _file(self, handler: BaseHTTPRequestHandler, files: dict[str, bytes], rest: list[str], body: bool) -> None:
        content = files.get("/".join(rest[2:]))
        if content is None:
            return self._send(handler, 404, b"", body, {"X-Error-Code": "EntryNotFound"})
        headers = {"ETag": f'"{hashlib.sha1(content).hexdigest()}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        return self._send(handler, 200, content, body, headers)

    @staticmethod
    def _send(
        handler: BaseHTTPRequestHandler, status: int, content: bytes, body: bool, headers: dict[str, str] | None = None
    ) -> None:
        handler.send_response(status)
        for name, value in (headers or {}).items():
            handler.send_header(name, value)
        handler.send_header("Content-Type", "application/json")
        handler.send_header("Content-Length", str(len(content)))
        handler.end_headers()
        if body:
            handler.wfile.write(content)
