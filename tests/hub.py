"""A stand-in for the Hugging Face Hub: the part of its HTTP API that downloads use, on a loopback port.

Files are told apart by ETag, parts of them are sent on request (Range), and connections can be cut.
"""

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Hub:
    """One model repository. `token`: only its bearer may read; `gated`: nobody may; `requests`: what was asked for.

    `cuts`: by name, after how many bytes the connection breaks off, once. `ranges`: by name, where downloads went on.
    """

    repo: str
    files: Mapping[str, bytes]
    revisions: tuple[str, ...] = ("main",)
    token: str | None = None
    gated: bool = False
    broken: bool = False
    endpoint: str = ""
    commit: str = COMMIT
    cuts: dict[str, int] = field(default_factory=dict)
    ranges: dict[str, str] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)

    def fetched(self) -> set[str]:
        """Names of the files whose content was sent."""
        return {path.partition(f"/resolve/{self.commit}/")[2] for path in self.requests if "/resolve/" in path}

    def respond(self, path: str, authorization: str | None) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body for a GET; a HEAD gets the same without the body."""
        if self.broken:
            return 500, {}, b""
        if self.gated:
            return 403, {"X-Error-Code": "GatedRepo"}, b""
        allowed = self.token in (None, (authorization or "").removeprefix("Bearer "))
        if not allowed or not path.startswith((f"/api/models/{self.repo}", f"/{self.repo}/")):
            return 401, {"X-Error-Code": "RepoNotFound"}, b""
        if path.startswith("/api/"):
            return self._describe(path.removeprefix(f"/api/models/{self.repo}"))
        revision, _, name = path.removeprefix(f"/{self.repo}/resolve/").partition("/")
        if revision not in (*self.revisions, self.commit):
            return 404, {"X-Error-Code": "RevisionNotFound"}, b""
        if name not in self.files:
            return 404, {"X-Error-Code": "EntryNotFound"}, b""
        headers = {"ETag": f'"{_digest(self.files[name])}"', "X-Repo-Commit": self.commit}
        return 200, headers, self.files[name]

    def _describe(self, path: str) -> tuple[int, dict[str, str], bytes]:
        what, _, rest = path.removeprefix("/").partition("/")
        revision = rest.partition("/")[0] if what in ("revision", "tree") else "main"
        if revision not in (*self.revisions, self.commit):
            return 404, {"X-Error-Code": "RevisionNotFound"}, b""
        headers = {"Content-Type": "application/json"}
        if what == "tree":
            tree = [
                {"type": "file", "path": name, "size": len(content), "oid": _digest(content)}
                for name, content in self.files.items()
            ]
            return 200, headers, json.dumps(tree).encode()
        siblings = [{"rfilename": name} for name in self.files]
        info = {
            "_id": "1",
            "id": self.repo,
            "modelId": self.repo,
            "sha": self.commit,
            "private": False,
            "siblings": siblings,
        }
        return 200, headers, json.dumps(info).encode()


@contextmanager
def serve(hub: Hub) -> Iterator[Hub]:
    """Serve `hub`; `hub.endpoint` is its address."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            path = unquote(urlsplit(self.path).path)
            if self.command == "GET":
                hub.requests.append(path)
            status, headers, body = hub.respond(path, self.headers["Authorization"])
            name = path.partition(f"/resolve/{hub.commit}/")[2]
            if self.command == "GET" and (wanted := self.headers["Range"]):
                hub.ranges[name] = wanted
                start = int(wanted.removeprefix("bytes=").removesuffix("-"))
                headers["Content-Range"] = f"bytes {start}-{len(body) - 1}/{len(body)}"
                status, body = 206, body[start:]
            self.send_response(status)
            for header, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(header, value)
            self.end_headers()
            if self.command == "GET":
                cut = hub.cuts.pop(name, None)
                self.wfile.write(body[:cut])
                self.close_connection = cut is not None

        do_HEAD = do_GET

        def log_message(self, format: str, *args: object) -> None:
            """Tests are quiet."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    hub.endpoint = f"http://127.0.0.1:{server.server_port}"
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _digest(content: bytes) -> str:
    return hashlib.sha1(content, usedforsecurity=False).hexdigest()
