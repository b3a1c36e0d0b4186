"""Models on the Hugging Face hub: `hf:ORG/NAME[@REVISION]` means the files of one commit.

In: such a path, HF_ENDPOINT and HF_TOKEN from the environment. Out: the path with its commit, the sha256 of the files
that an import reads, and those files. A revision is resolved to a commit once, and a commit's digests are requested
once; the user's cache folder keeps both, so that planning needs the hub only for models that are new on this machine.
Pickles are never fetched.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from pipelines.errors import StoreError, StoreUnreachable
from pipelines.files.digests import cache_folder, file_digests
from pipelines.spec import COMMIT, HUB_PATH, RecipeError

if TYPE_CHECKING:
    from huggingface_hub import HfApi

DEFAULT_ENDPOINT = "https://huggingface.co"
WEIGHTS = ("model.safetensors", "model-*-of-*.safetensors")
READ = ("config.json", "preprocessor_config.json", "README.md", "model.safetensors.index.json", *WEIGHTS)


def pinned(path: str) -> str:
    """Return hf:ORG/NAME@COMMIT for a path with any revision.

    Raises:
        RecipeError: there is no such model or revision. StoreUnreachable: the hub does not answer.
    """
    repository, revision = _parse(path)
    if re.fullmatch(COMMIT, revision):
        return path
    record = _record(repository, revision)
    if (cached := _recall(record)) is None:
        cached = {"commit": _ask(path)["commit"]}
        _remember(record, cached)
    return f"hf:{repository}@{cached['commit']}"


def digests(path: str) -> dict[str, str]:
    """Return {file: sha256 of its content}, for the files of a pinned path that an import reads. Raises as `pinned`."""
    repository, commit = _parse(path)
    record = _record(repository, commit)
    if (cached := _recall(record)) is None:
        cached = {"files": _ask(path)["files"]}
        _remember(record, cached)
    return dict(cached["files"])


def fetch(path: str, folder: Path) -> Path:
    """Fetch the files of a pinned path into the hub's own cache, and return `folder` with links to them.

    The cache's own folder is not used, because it may contain other files of the commit, which another program fetched:
    their digests are unknown, and a reader might prefer a pickle.

    Raises:
        StoreError: a file does not match its digest. StoreUnreachable: the hub does not answer.
    """
    repository, commit = _parse(path)
    expected = digests(path)
    with translate_errors(path):
        files = {name: _download(repository, commit, name) for name in expected}
    for name, digest in file_digests(files.items()):
        if digest != expected[name]:
            raise StoreError(f"{path}: {name} has sha256 {digest}, but {expected[name]} was expected")
    for name, file in files.items():
        (folder / name).symlink_to(file.absolute())
    return folder


def _parse(path: str) -> tuple[str, str]:
    """Return (ORG/NAME, revision)."""
    match = re.fullmatch(HUB_PATH, path)
    assert match is not None, path
    return match["repository"], match["revision"] or "main"


def _ask(path: str) -> dict[str, Any]:
    """Return a path's commit and its files' sha256, which the hub states for large files; small ones are fetched."""
    repository, revision = _parse(path)
    with translate_errors(path):
        info = _api().model_info(repository, revision=revision, files_metadata=True)
    if not re.fullmatch(COMMIT, info.sha or ""):
        raise StoreError(
            f"{path}: {_endpoint()} gave {info.sha!r} as its commit; expected 40 hexadecimal digits"
        )
    commit = str(info.sha)
    files = {file.rfilename: file for file in info.siblings or ()}
    names = [
        name for name in sorted(files) if "/" not in name and any(fnmatch(name, pattern) for pattern in READ)
    ]
    missing = [
        needed
        for needed, patterns in (("config.json", ("config.json",)), ("model.safetensors", WEIGHTS))
        if not any(fnmatch(name, pattern) for name in names for pattern in patterns)
    ]
    if missing:
        raise RecipeError(
            f"{path}: missing {' and '.join(missing)}; expected a model with config.json and model.safetensors "
            f"(pickles such as pytorch_model.bin are not fetched). It contains: {', '.join(sorted(files))}"
        )
    with translate_errors(path):
        small = {name: _download(repository, commit, name) for name in names if files[name].lfs is None}
    sha256s = {name: lfs.sha256 for name in names if (lfs := files[name].lfs) is not None}
    sha256s |= dict(file_digests(small.items()))
    return {"commit": commit, "files": sha256s}


def _download(repository: str, commit: str, name: str) -> Path:
    from huggingface_hub import hf_hub_download

    return Path(hf_hub_download(repository, name, revision=commit, endpoint=_endpoint(), token=_token()))


def _api() -> HfApi:
    from huggingface_hub import HfApi

    return HfApi(endpoint=_endpoint(), token=_token())


def _endpoint() -> str:
    return os.environ.get("HF_ENDPOINT", DEFAULT_ENDPOINT).rstrip("/")


def _token() -> str | bool:
    """Return HF_TOKEN; False: none, not even a token saved by a login, which other machines would not have."""
    return os.environ.get("HF_TOKEN") or False


@contextmanager
def translate_errors(path: str) -> Iterator[None]:
    """Turn errors of the hub's client into vitflow's, which name the path."""
    try:
        import httpx2
        from huggingface_hub.errors import (
            GatedRepoError,
            HFValidationError,
            RepositoryNotFoundError,
            RevisionNotFoundError,
        )
        from huggingface_hub.utils.tqdm import disable_progress_bars
    except ImportError as error:
        raise RecipeError(
            f"{path}: the package {error.name} is not installed: pip install 'vitflow[hub]'"
        ) from None
    disable_progress_bars()  # each would be a line in the log
    try:
        yield
    except GatedRepoError:
        raise RecipeError(
            f"{path}: {_endpoint()} refuses access. Accept the model's terms there, and set HF_TOKEN"
        ) from None
    except RepositoryNotFoundError:
        raise RecipeError(
            f"{path}: no such model at {_endpoint()}. Check the name; for a private model set HF_TOKEN"
        ) from None
    except RevisionNotFoundError:
        raise RecipeError(
            f"{path}: the model has no such revision; expected a branch, tag or commit"
        ) from None
    except HFValidationError as error:
        raise RecipeError(f"{path}: {error}") from None
    except (httpx2.HTTPError, OSError) as error:  # OSError: also a full disk
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise StoreUnreachable(f"{path}: cannot fetch it from {_endpoint()}: {reason}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise StoreError(
            f"{path}: {_endpoint()} does not answer as the Hugging Face hub does ({error!r}). Check HF_ENDPOINT"
        ) from None


def _record(repository: str, revision: str) -> Path:
    name = f"{repository}@{revision}.json"
    return cache_folder() / "hub" / quote(_endpoint(), safe="") / quote(name, safe="")


def _recall(record: Path) -> dict[str, Any] | None:
    try:
        return dict(json.loads(record.read_text()))
    except (OSError, ValueError):
        return None  # a cache: the hub is asked again


def _remember(record: Path, content: dict[str, Any]) -> None:
    with suppress(OSError):  # a cache: without it, the hub is asked again
        record.parent.mkdir(parents=True, exist_ok=True)
        temporary = record.with_suffix(f".{os.getpid()}.tmp")
        temporary.write_text(json.dumps(content, indent=1))
        temporary.replace(record)
