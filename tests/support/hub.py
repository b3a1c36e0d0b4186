"""A server in the Hugging Face hub's protocol, on loopback: models as commits of files, large ones in LFS."""

import base64
import hashlib
import json
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from werkzeug import Request, Response

from tests.support.serving import break_off, serving

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

    private: dict[str, bool] = field(default_factory=dict)
    """ORG/NAME -> its visibility, of repositories that were made by a request."""
    uploaded: dict[str, bytes] = field(default_factory=dict)
    """sha256 -> a large file."""
    refused: dict[str, int] = field(default_factory=dict)
    """The end of a path -> the status that requests for it get."""

    def commit(self, repository: str, files: dict[str, bytes]) -> str:
        """Make a commit the main one."""
        commit = hashlib.sha1(repr(sorted(files.items())).encode()).hexdigest()
        self.commits.setdefault(repository, {})[commit] = files
        return commit

    def __call__(self, environ: dict[str, Any], start: Any) -> Iterable[bytes]:
        request = Request(environ)
        self.asked.append((request.method, request.path))
        name = request.path.rpartition("/")[2]
        response = self.answer(request)
        if request.method == "GET" and name in self.cut:
            self.cut.remove(name)
            return break_off(response, environ, start)
        return response(environ, start)

    def answer(self, request: Request) -> Response:
        for end, status in self.refused.items():
            if request.path.endswith(end):
                return Response("hf_secret in an untrusted text", status)
        if request.path.startswith("/lfs/"):  # its address has a signature instead of a token
            return self.store_large(request)
        if self.token is not None and request.headers.get("Authorization") != f"Bearer {self.token}":
            return _error(401, "RepoNotFound")
        if request.method == "POST":
            return _json(self.changed(request))
        if page := re.fullmatch(r"/api/models/([^/]+/[^/]+)", request.path):
            return _json({"id": page[1], "private": self.private[page[1]]})
        is_page = re.fullmatch(r"/api/models/([^/]+/[^/]+)/revision/(.+)()", request.path)
        asked = is_page or re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", request.path)
        if asked is None:
            return Response(status=404)
        repository, revision, name = asked.groups()
        if (commits := self.commits.get(repository)) is None:
            return _error(404, "RepoNotFound")
        commit = [*commits][-1] if revision == "main" else revision
        if (files := commits.get(commit)) is None:
            return _error(404, "RevisionNotFound")
        if is_page:
            entries = [_entry(*file) for file in files.items()]
            record = {"id": repository, "modelId": repository, "sha": commit, "siblings": entries}
            return Response(self.info_sent or json.dumps(record), content_type="application/json")
        if name not in files:
            return _error(404, "EntryNotFound", **{"X-Repo-Commit": commit})
        entry, sent = _entry(name, files[name]), self.tampered.get(name, files[name])
        etag = self.etag or entry.get("lfs", {}).get("sha256", entry["blobId"])
        begin = int(request.headers.get("Range", "bytes=0-").removeprefix("bytes=").rstrip("-"))
        headers = {"ETag": f'"{etag}"', "X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
        return Response(sent[begin:], 206 if begin else 200, headers)

    def store_large(self, request: Request) -> Response:
        """The upload of a large file to the address that the batch gave."""
        sha256 = request.path.rpartition("/")[2]
        assert request.method == "PUT" and hashlib.sha256(request.data).hexdigest() == sha256
        self.uploaded[sha256] = request.data
        return Response()

    def changed(self, request: Request) -> dict[str, Any]:
        """The answer to the requests of a push, in their order."""
        if request.path == "/api/repos/create":
            name = f"{request.json['organization']}/{request.json['name']}"
            self.private.setdefault(name, request.json["visibility"] == "private")
            self.commits.setdefault(name, {})
            return {"url": f"{self.endpoint}/{name}"}
        if request.path == "/api/validate-yaml":
            assert request.json["content"].startswith("---\n")
            return {"errors": [], "warnings": []}
        if request.path.endswith("/preupload/main"):
            paths = [file["path"] for file in request.json["files"]]
            modes = {path: "lfs" if path.endswith(LFS_SUFFIXES) else "regular" for path in paths}
            files = [{"path": path, "uploadMode": mode, "shouldIgnore": False} for path, mode in modes.items()]
            return {"files": files}
        if request.path.endswith(".git/info/lfs/objects/batch"):
            objects = [
                {**wanted, "actions": {"upload": {"href": f"{self.endpoint}/lfs/{wanted['oid']}"}}}
                for wanted in request.json["objects"]
            ]
            return {"transfer": "basic", "objects": objects}
        is_commit = re.fullmatch(r"/api/models/([^/]+/[^/]+)/commit/main", request.path)
        assert is_commit is not None, request.path
        name = is_commit[1]
        files = dict([*self.commits[name].values()][-1]) if self.commits[name] else {}
        for line in map(json.loads, request.data.splitlines()):
            if line["key"] == "file":
                files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            elif line["key"] == "lfsFile":
                files[line["value"]["path"]] = self.uploaded[line["value"]["oid"]]
        commit = self.commit(name, files)
        return {"commitUrl": f"{self.endpoint}/{name}/commit/{commit}", "commitOid": commit, "hookOutput": ""}


def _json(answer: dict[str, Any]) -> Response:
    return Response(json.dumps(answer), content_type="application/json")


def _error(status: int, code: str, **headers: str) -> Response:
    return Response(status=status, headers={"X-Error-Code": code} | headers)


def _entry(name: str, data: bytes) -> dict[str, Any]:
    """A file as a model's page lists it."""
    blob = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
    entry: dict[str, Any] = {"rfilename": name, "size": len(data), "blobId": blob}
    if name.endswith(LFS_SUFFIXES):
        sha256 = hashlib.sha256(data).hexdigest()
        entry["lfs"] = {"sha256": sha256, "size": len(data), "pointerSize": 130}
    return entry


@contextmanager
def running_hub() -> Iterator[Hub]:
    """A hub that answers until the block ends."""
    hub = Hub()
    with serving(hub) as hub.endpoint:
        yield hub
