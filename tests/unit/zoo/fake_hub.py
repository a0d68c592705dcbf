"""A small Hugging Face hub on 127.0.0.1: the answers the real client relies on, and the ways a real one fails.

Large files answer with a redirect to a "CDN", Range requests and an X-Linked-Etag, as the hub does.
"""

from __future__ import annotations

import hashlib
import json
import threading
import time
import urllib.parse
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

LFS_SUFFIXES = (".safetensors", ".gguf", ".bin")


@dataclass
class Repo:
    files: dict[str, bytes]
    commit: str = "a" * 40
    gated: bool = False
    stated_sha: dict[str, str] = field(default_factory=dict)
    """Checksums the hub states that differ from the bytes it sends."""


@dataclass
class Seen:
    method: str
    path: str
    range: str | None
    token: str | None


class FakeHub:
    """`drop_after` cuts the next large response after so many bytes; `delay` slows every block of one."""

    def __init__(self) -> None:
        self.repos: dict[str, Repo] = {}
        self.seen: list[Seen] = []
        self.drop_after: list[int] = []
        self.ignore_range = False
        self.delay = 0.0
        self.status: int | None = None
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, format: str, *args: object) -> None:
                pass

            def do_HEAD(self) -> None:
                hub.answer(self, body=False)

            def do_GET(self) -> None:
                hub.answer(self, body=True)

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True)
        self.thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_address[1]}"

    @property
    def cdn_url(self) -> str:
        """Another host name, as the real one's is: the client treats it as a stranger."""
        return f"http://localhost:{self.server.server_address[1]}"

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join(5)

    def gets(self, part: str) -> list[Seen]:
        return [s for s in self.seen if s.method == "GET" and part in s.path]

    def answer(self, http: BaseHTTPRequestHandler, *, body: bool) -> None:
        path = urllib.parse.unquote(http.path.partition("?")[0])
        self.seen.append(Seen(http.command, path, http.headers.get("Range"), http.headers.get("Authorization")))
        if self.status is not None:
            return self._send(http, self.status, b"<html>log in</html>", {}, body)
        if path.startswith("/api/models/"):
            return self._info(http, path.removeprefix("/api/models/"), body)
        if path.startswith("/cdn/"):
            return self._cdn(http, path.removeprefix("/cdn/"), body)
        repo, _, rest = path.lstrip("/").partition("/resolve/")
        revision, _, name = rest.partition("/")
        return self._resolve(http, repo, revision, name, body)

    def _info(self, http: BaseHTTPRequestHandler, path: str, body: bool) -> None:
        name, _, revision = path.partition("/revision/")
        repo = self.repos.get(name)
        if repo is None:
            return self._send(http, 404, b"{}", {"X-Error-Code": "RepoNotFound"}, body)
        if revision not in ("", "main", repo.commit):
            return self._send(http, 404, b"{}", {"X-Error-Code": "RevisionNotFound"}, body)
        siblings = []
        for file, data in repo.files.items():
            row: dict[str, object] = {"rfilename": file, "size": len(data), "blobId": hashlib.sha1(data).hexdigest()}
            if file.endswith(LFS_SUFFIXES):
                row["lfs"] = {"sha256": self._sha(repo, file), "size": len(data), "pointerSize": 134}
            siblings.append(row)
        info = {"_id": "1", "id": name, "modelId": name, "sha": repo.commit, "siblings": siblings, "private": False}
        return self._send(http, 200, json.dumps(info).encode(), {"Content-Type": "application/json"}, body)

    def _resolve(self, http: BaseHTTPRequestHandler, name: str, revision: str, file: str, body: bool) -> None:
        repo = self.repos.get(name)
        if repo is None:
            return self._send(http, 404, b"", {"X-Error-Code": "RepoNotFound"}, body)
        if repo.gated and http.headers.get("Authorization") != "Bearer hf_good":
            return self._send(http, 403, b"", {"X-Error-Code": "GatedRepo"}, body)
        if file not in repo.files:
            return self._send(http, 404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": repo.commit}, body)
        data = repo.files[file]
        headers = {"X-Repo-Commit": repo.commit, "Accept-Ranges": "bytes"}
        if not file.endswith(LFS_SUFFIXES):
            return self._send(http, 200, data, headers | {"ETag": f'"{hashlib.sha1(data).hexdigest()}"'}, body)
        headers |= {"X-Linked-Etag": f'"{self._sha(repo, file)}"', "X-Linked-Size": str(len(data))}
        headers["Location"] = f"{self.cdn_url}/cdn/{name}/{file}"
        return self._send(http, 302, b"", headers, body)

    def _cdn(self, http: BaseHTTPRequestHandler, path: str, body: bool) -> None:
        owner, name, file = path.split("/", 2)
        data = self.repos[f"{owner}/{name}"].files[file]
        start = 0
        wanted = http.headers.get("Range")
        if wanted and not self.ignore_range:
            start = int(wanted.removeprefix("bytes=").split("-")[0])
        status = 206 if start else 200
        extra = {"Content-Range": f"bytes {start}-{len(data) - 1}/{len(data)}"} if start else {}
        self._send(http, status, data[start:], extra, body, droppable=True)

    def _send(
        self,
        http: BaseHTTPRequestHandler,
        status: int,
        data: bytes,
        headers: dict[str, str],
        body: bool,
        *,
        droppable: bool = False,
    ) -> None:
        http.send_response(status)
        for key, value in headers.items():
            http.send_header(key, value)
        http.send_header("Content-Length", str(len(data)))
        http.end_headers()
        if not body:
            return
        limit = self.drop_after.pop(0) if droppable and self.drop_after else len(data)
        try:
            for at in range(0, min(limit, len(data)), 65536):
                http.wfile.write(data[at : min(at + 65536, limit)])
                if droppable and self.delay:
                    time.sleep(self.delay)
        except (BrokenPipeError, ConnectionResetError):
            limit = 0
        if limit < len(data):
            http.close_connection = True

    @staticmethod
    def _sha(repo: Repo, file: str) -> str:
        return repo.stated_sha.get(file) or hashlib.sha256(repo.files[file]).hexdigest()
