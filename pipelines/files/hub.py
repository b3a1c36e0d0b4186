"""Models on the Hugging Face hub: `hf:ORG/NAME[@REVISION]` means the files of one commit.

In: such a path, HF_ENDPOINT and HF_TOKEN from the environment. Out: the path with its commit, the sha256 of the files
that an import reads, and those files. A revision is resolved to a commit once, and a commit's digests are requested
once; the user's cache folder keeps both, so that planning needs the hub only for models that are new on this machine.
Pickles are never fetched.

The hub is not trusted: its answers have a limited size, and files are kept under their sha256. Of huggingface_hub only
the HTTP client is used to fetch, because its downloads take their names from a header, which can contain any path.

`push` uploads a folder as one commit, with huggingface_hub.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from fnmatch import fnmatch
from http import HTTPStatus
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory
from time import sleep
from typing import IO, Any, NoReturn
from urllib.parse import quote

from pydantic import BaseModel, Field, ValidationError

from pipelines.errors import StoreError, StoreUnreachable
from pipelines.files.hashing import cache_folder, local_digests, read_cache, write_cache
from pipelines.scratch import named_if_full
from pipelines.spec import COMMIT, HUB_PATH, RecipeError
from vit_model.errors import UserError

DEFAULT_ENDPOINT = "https://huggingface.co"
WEIGHTS = ("model.safetensors", "model-*-of-*.safetensors")
READ = ("config.json", "preprocessor_config.json", "README.md", "model.safetensors.index.json", *WEIGHTS)
SMALL_BYTES = 32 * 2**20  # limit for an answer, and for a file that is not in Git LFS; the hub's own is 10 MB
LARGE_BYTES = 50 * 10**9  # limit for a model
SECONDS = 30.0  # without an answer, or without more of it
TRIES = 5
FETCH = "fetch it from"
_NAMED = 20  # files of a model that a message lists


class _Lfs(BaseModel):
    sha256: str = Field(pattern=r"^[0-9a-f]{64}\z")


class _File(BaseModel):
    name: str = Field(alias="rfilename")
    size: int = Field(ge=0)
    lfs: _Lfs | None = None

    def is_read(self) -> bool:
        return bool(re.fullmatch(r"[\w.-]{1,100}", self.name, re.ASCII)) and _matches(self.name, READ)


class _Model(BaseModel):
    """A model at a commit, as the hub describes it."""

    commit: str = Field(alias="sha", pattern=rf"^{COMMIT}\z")
    files: tuple[_File, ...] = Field(alias="siblings")


def pinned(path: str) -> str:
    """Return hf:ORG/NAME@COMMIT for a path with any revision.

    Raises:
        RecipeError: there is no such model or revision. StoreUnreachable: the hub does not answer.
    """
    repository, revision = _parse(path)
    return path if re.fullmatch(COMMIT, revision) else f"hf:{repository}@{_known(path, 'commit')}"


def digests(path: str) -> dict[str, str]:
    """Return {file: sha256 of its content}, for the files of a pinned path that an import reads. Raises as `pinned`."""
    return dict(_known(path, "files"))


def fetch(path: str, folder: Path) -> Path:
    """Fetch the files of a pinned path into the user's cache folder, and return `folder` with links to them.

    Raises:
        StoreError: a file does not match its digest. StoreUnreachable: the hub does not answer.
    """
    sizes = _known(path, "sizes")
    for name, sha256 in digests(path).items():
        file = cache_folder() / "hub" / "files" / sha256
        if not file.is_file() or _digest(file) != sha256:
            _download(path, name, sizes[name], sha256)
        (folder / name).symlink_to(file.absolute())
    return folder


def pushable(target: str) -> str:
    """Return the repository of hf:ORG/NAME, if `push` may be tried.

    Raises:
        RecipeError: it has another form, or HF_TOKEN is missing.
    """
    match = re.fullmatch(HUB_PATH, target)
    if match is None or match["revision"]:
        raise RecipeError(f"{target!r} is not a repository on the Hugging Face hub; expected hf:ORG/NAME")
    if not _token():
        raise RecipeError(
            f"{target}: HF_TOKEN is not set. Make a token that may write at {_endpoint()}/settings/tokens, and set it"
        )
    return match["repository"]


def push(repository: str, folder: Path, title: str, is_public: bool) -> bool:
    """Upload a folder's files as one commit; return whether the repository is private.

    A new repository is private unless `is_public`. In an existing one, files of other names stay, and so does its
    visibility.

    Raises:
        RecipeError: the hub refuses the token or the upload, or a repository that exists is public and `is_public` is
            false. StoreUnreachable: the hub does not answer.
    """
    path = f"hf:{repository}"
    with _translated(path, "push it to"):
        from huggingface_hub import CommitOperationAdd, HfApi, errors, utils

        if not sys.stderr.isatty():
            utils.disable_progress_bars()  # type: ignore[attr-defined]
        api = HfApi(endpoint=_endpoint(), token=_token())
        # not upload_folder, which makes several commits of a large folder
        files = [CommitOperationAdd(file.name, file) for file in sorted(folder.iterdir())]
        with _upload_errors(path, errors.HfHubHTTPError):
            api.create_repo(repository, private=not is_public, exist_ok=True)
            is_private = bool(api.model_info(repository).private)
            if not (is_private or is_public):
                raise RecipeError(f"{path}: this repository is public. Give --public, or another name")
            api.create_commit(repository, files, commit_message=title)
    return is_private


@contextmanager
def _upload_errors(path: str, refused: type[Exception]) -> Iterator[None]:
    """Turn the client's errors into vitflow's, without the hub's text; `refused` is raised for an HTTP status."""
    why = {
        HTTPStatus.BAD_REQUEST: "refuses the files or the model card",
        HTTPStatus.UNAUTHORIZED: "does not accept HF_TOKEN. Make a new token there",
        HTTPStatus.FORBIDDEN: "does not let HF_TOKEN write there. Use a token that may, or another name",
        HTTPStatus.NOT_FOUND: "has no such user or organisation, or HF_TOKEN may not see it",
    }
    try:
        yield
    except refused as error:
        status = error.response.status_code  # type: ignore[attr-defined]
        if status in why:
            raise RecipeError(f"{path}: {_endpoint()} {why[HTTPStatus(status)]} (HTTP status {status})") from None
        raise StoreUnreachable(f"{path}: cannot push it to {_endpoint()}: HTTP status {status}") from None
    except RuntimeError as error:  # the client's thread that uploads a large file
        reason = type(error.__cause__ or error).__name__
        raise StoreUnreachable(f"{path}: cannot push it to {_endpoint()}: {reason} in a large file") from None
    except UserError:
        raise
    except (KeyError, TypeError, ValueError) as error:
        raise StoreError(
            f"{path}: {_endpoint()} does not answer as the Hugging Face hub does. Check HF_ENDPOINT"
        ) from error


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch(name, pattern) for pattern in patterns)


def _parse(path: str) -> tuple[str, str]:
    """Return (ORG/NAME, revision)."""
    match = re.fullmatch(HUB_PATH, path)
    assert match is not None, path
    return match["repository"], match["revision"] or "main"


def _known(path: str, fact: str) -> Any:
    """Return a path's "commit", or the "files" or "sizes" of a commit, from the cache or else from the hub."""
    record = _record(*_parse(path))
    cached = read_cache(record)
    if fact not in cached:
        cached = _ask(path)
        write_cache(record, cached)
    return cached[fact]


def _ask(path: str) -> dict[str, Any]:
    """Return a path's commit, and its files' sha256, which the hub states for large files, and sizes in bytes."""
    model = _describe(path)
    files = {file.name: file for file in sorted(model.files, key=lambda file: file.name) if file.is_read()}
    missing = [
        needed
        for needed, patterns in (("config.json", ("config.json",)), ("model.safetensors", WEIGHTS))
        if not any(_matches(name, patterns) for name in files)
    ]
    if missing:
        names = sorted(file.name for file in model.files) or ["nothing"]
        more = f" and {len(names) - _NAMED:,} more" if len(names) > _NAMED else ""
        raise RecipeError(
            f"{path}: missing {' and '.join(missing)}; expected a model with config.json and model.safetensors "
            f"(pickles such as pytorch_model.bin are not fetched). It contains: {', '.join(names[:_NAMED])}{more}"
        )
    sizes = {name: file.size for name, file in files.items()}
    if sum(sizes.values()) > LARGE_BYTES:
        raise RecipeError(f"{path}: its files have {sum(sizes.values()):,} bytes; at most {LARGE_BYTES:,} are fetched")
    commit = f"hf:{_parse(path)[0]}@{model.commit}"
    sha256s = {
        # the hub states another kind of digest for small files
        name: file.lfs.sha256 if file.lfs else _download(commit, name, min(file.size, SMALL_BYTES))
        for name, file in files.items()
    }
    return {"commit": model.commit, "files": sha256s, "sizes": sizes}


def _describe(path: str) -> _Model:
    repository, revision = _parse(path)
    answer, place = BytesIO(), f"/api/models/{repository}/revision/{quote(revision, safe='')}?blobs=true"
    with _translated(path):
        _get(path, place, answer, SMALL_BYTES)
        return _Model.model_validate_json(answer.getvalue())


def _download(path: str, name: str, limit: int, expected: str | None = None) -> str:
    """Fetch a file of a pinned path into the cache folder, under its sha256; return that.

    Raises:
        StoreError: it has more bytes than `limit`, or another sha256 than expected.
    """
    repository, commit = _parse(path)
    folder = cache_folder() / "hub" / "files"
    with _translated(path):
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=folder) as fresh:
            file = Path(fresh) / "file"
            with named_if_full(file), file.open("wb") as written:
                _get(path, f"/{repository}/resolve/{commit}/{quote(name)}", written, limit)
            digest = _digest(file)
            if digest != (expected or digest):
                raise StoreError(f"{path}: {name} has sha256 {digest}, but {expected} was expected")
            file.replace(folder / digest)
    return digest


def _digest(file: Path) -> str:
    return next(local_digests([file]))


def _get(path: str, address: str, file: IO[bytes], limit: int) -> None:
    """Write the hub's answer into an empty file; if the connection breaks, resume from there.

    Raises:
        StoreError: it has more than `limit` bytes. RecipeError: see `_refuse`. Also the errors of `_translated`.
    """
    import httpx2
    from huggingface_hub.utils import (  # type: ignore[attr-defined]
        build_hf_headers,
        get_session,
    )

    headers = build_hf_headers(token=_token()) | {"Accept-Encoding": "identity"}
    for tries_left in reversed(range(TRIES)):
        resumed = {"Range": f"bytes={file.tell()}-"} if file.tell() else {}
        url = _endpoint() + address
        try:
            with get_session().stream("GET", url, headers=headers | resumed, timeout=SECONDS) as response:
                if response.is_error:
                    _refuse(path, response.status_code, response.headers.get("X-Error-Code"))
                if response.status_code != HTTPStatus.PARTIAL_CONTENT:
                    file.seek(0)
                    file.truncate()
                for chunk in response.iter_bytes():
                    if file.tell() + len(chunk) > limit:
                        raise StoreError(f"{path}: {url} has more than the expected {limit:,} bytes")
                    file.write(chunk)
                return
        except httpx2.TransportError:
            if not (tries_left and file.tell()):
                raise
            sleep(1)


def _refuse(path: str, status: int, code: str | None) -> NoReturn:
    """Raise the error that the hub's answer means, without its untrusted text."""
    if code == "GatedRepo":
        raise RecipeError(f"{path}: {_endpoint()} refuses access. Accept the model's terms there, and set HF_TOKEN")
    if code == "RepoNotFound" or status == HTTPStatus.UNAUTHORIZED:
        raise RecipeError(f"{path}: no such model at {_endpoint()}. Check the name; for a private model set HF_TOKEN")
    if code == "RevisionNotFound":
        raise RecipeError(f"{path}: the model has no such revision; expected a branch, tag or commit")
    raise StoreUnreachable(f"{path}: cannot fetch it from {_endpoint()}: HTTP status {status}")


def _endpoint() -> str:
    """Return the hub's address. Raises StoreError if it has a password, which messages and the cache would show."""
    endpoint = os.environ.get("HF_ENDPOINT", DEFAULT_ENDPOINT).rstrip("/")
    if "@" in endpoint:
        raise StoreError("HF_ENDPOINT contains a user or a password; give only the address, and set HF_TOKEN")
    return endpoint


def _token() -> str | bool:
    """Return HF_TOKEN; False: none, not even a token saved by a login, which other machines would not have.

    Raises:
        StoreError: it has characters that no token has, and the client's error would show them.
    """
    token = os.environ.get("HF_TOKEN", "").strip()
    if not re.fullmatch(r"[!-~]*", token):
        raise StoreError("HF_TOKEN contains a space, a control character or a letter that is not ASCII")
    return token or False


@contextmanager
def _translated(path: str, doing: str = FETCH) -> Iterator[None]:
    """Turn errors of the hub's client into vitflow's, which name the path and what was being done."""
    try:
        import httpx2
        from huggingface_hub.errors import HFValidationError
        from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]
    except ImportError as error:
        raise RecipeError(f"{path}: the package {error.name} is not installed: pip install 'vitflow[hub]'") from None
    try:
        validate_repo_id(_parse(path)[0])
        yield
    except HFValidationError as error:
        raise RecipeError(f"{path}: {error}") from None
    except (httpx2.HTTPError, OSError) as error:  # OSError: also a full disk
        reason = str(error).partition("\n")[0] or type(error).__name__
        is_offline = isinstance(error, httpx2.ConnectError) and doing == FETCH
        advice = ". Check the network, or download it elsewhere and give its folder or file" if is_offline else ""
        raise StoreUnreachable(f"{path}: cannot {doing} {_endpoint()}: {reason}{advice}") from None
    except (ValidationError, httpx2.InvalidURL) as error:
        reason = error.errors()[0]["msg"] if isinstance(error, ValidationError) else str(error)
        raise StoreError(
            f"{path}: {_endpoint()} does not answer as the Hugging Face hub does ({reason}). Check HF_ENDPOINT"
        ) from None


def _record(repository: str, revision: str) -> str:
    """Return the name of the cache file for the hub's answer about a revision."""
    return f"hub/{quote(_endpoint(), safe='')}/{quote(f'{repository}@{revision}.json', safe='')}"
