"""A server in the Hugging Face hub's protocol, on loopback: models as commits of files, large ones in LFS."""

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

LFS_SUFFIXES = (".safetensors", ".bin")


@dataclass
class Hub:
    """What the server has. `asked` are the requests that it answered, (method, path)."""

    endpoint: str = ""
    commits: dict[str, dict[str, dict[str, bytes]]] = field(default_factory=dict)
    """ORG/NAME -> commit -> file -> content; the last commit is main."""
    token: str | None = None
    """Without it, nothing is found."""
    asked: list[tuple[str, str]] = field(default_factory=list)
    tampered: dict[str, bytes] = field(default_factory=dict)
    """File -> what is sent instead of its content."""

    etag: str | None = None
    """Instead of a digest of the file."""
    cut: set[str] = field(default_factory=set)
    """Files whose first answer ends in the middle."""

    info_sent: bytes | None = None
    """Instead of what a model's page says."""

    def commit(self, repository: str, files: dict[str, bytes]) -> str:
        """Make a commit the main one."""
        commit = hashlib.sha1(repr(sorted(files.items())).encode()).hexdigest()
        self.commits.setdefault(repository, {})[commit] = files
        return commit


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.asked.append((self.command, path))
        if self.hub.token is not None and self.headers.get("Authorization") != f"Bearer {self.hub.token}":
            self.answer(401, b"", {"X-Error-Code": "RepoNotFound"})
        elif listed := re.fullmatch(r"/api/models/([^/]+/[^/]+)/revision/(.+)", path):
            self.info(*listed.groups())
        elif file := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            self.file(*file.groups())
        else:
            self.answer(404, b"")

    do_HEAD = do_GET  # noqa: N815 (http.server's name)

    def found(self, repository: str, revision: str) -> tuple[str, dict[str, bytes]] | None:
        """The commit and its files; None: answered that there is none."""
        commits = self.hub.commits.get(repository)
        if commits is None:
            self.answer(404, b"", {"X-Error-Code": "RepoNotFound"})
            return None
        commit = [*commits][-1] if revision == "main" else revision
        if commit not in commits:
            self.answer(404, b"", {"X-Error-Code": "RevisionNotFound"})
            return None
        return commit, commits[commit]

    def info(self, repository: str, revision: str) -> None:
        if (known := self.found(repository, revision)) is None:
            return
        commit, files = known
        siblings: list[dict[str, Any]] = []
        for name, data in files.items():
            entry = {"rfilename": name, "size": len(data), "blobId": _git_digest(data)}
            if name.endswith(LFS_SUFFIXES):
                entry["lfs"] = {"sha256": _sha256(data), "size": len(data), "pointerSize": 130}
            siblings.append(entry)
        record = {"id": repository, "modelId": repository, "sha": commit, "siblings": siblings}
        data = self.hub.info_sent or json.dumps(record).encode()
        self.answer(200, data, {"Content-Type": "application/json"})

    def file(self, repository: str, revision: str, name: str) -> None:
        if (known := self.found(repository, revision)) is None:
            return
        commit, files = known
        if name not in files:
            self.answer(404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit})
            return
        data = files[name]
        etag = self.hub.etag or (_sha256(data) if name.endswith(LFS_SUFFIXES) else _git_digest(data))
        sent = self.hub.tampered.get(name, data)
        start = int(self.headers.get("Range", "bytes=0-").removeprefix("bytes=").rstrip("-"))
        self.answer(
            206 if start else 200,
            sent[start:],
            {"ETag": f'"{etag}"', "X-Repo-Commit": commit, "Accept-Ranges": "bytes"},
            cut=name in self.hub.cut,
        )
        self.hub.cut.discard(name)

    def answer(
        self, status: int, data: bytes, headers: dict[str, str] | None = None, cut: bool = False
    ) -> None:
        self.send_response_only(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data[: len(data) // 2] if cut else data)
        self.close_connection |= cut

    def log_message(self, *_: object) -> None:
        pass


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _git_digest(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


@contextmanager
def serving(hub: Hub) -> Iterator[Hub]:
    """The hub, answering until the block ends; then connections are refused."""
    handler = type("Handler", (_Handler,), {"hub": hub})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as listener:
        threading.Thread(target=listener.serve_forever, args=(0.02,), daemon=True).start()
        hub.endpoint = f"http://127.0.0.1:{listener.server_port}"
        yield hub
        listener.shutdown()
