"""Writing a site to a folder, or to s3://bucket/prefix.

Reports are copied once. The data come after them, and the page that loads the data comes last.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment, FileSystemLoader

from pipelines.files import s3
from pipelines.spec import RecipeError
from pipelines.store import Manifest, Store, StoreDamaged, local_file, warn

DATA, REPORTS = "data.js", "reports"
_TYPES = {"html": "text/html", "js": "text/javascript", "css": "text/css"}
_STYLE = Path(__file__).parents[2] / "ray_jobs" / "reporting"  # of reports, which the site shares


class Place(NamedTuple):
    """Where a site is written."""

    reports: set[str]
    """The names of those that it has."""
    write: Callable[[str, bytes], None]
    first: str
    """The path or URI of its first page."""


def place(to: str) -> Place:
    """Return the place of a site.

    Raises:
        RecipeError: there are other files, or it cannot be written.
        StoreError: the bucket cannot be listed.
    """
    return _bucket(to.rstrip("/")) if to.startswith("s3://") else _folder(Path(to))


def write(store: Store, data: dict[str, Any], reports: list[Manifest], to: Place) -> None:
    """Write a site with the data of `pipelines.pages.collect`, and the reports that it does not have yet."""
    pages = {}
    for report in reports:
        key = report.key[:12]
        name = f"{key}.html"
        if name not in to.reports:
            try:
                path = local_file(store, report, "report.html")
            except StoreDamaged as error:
                warn(f"{error}; leaving it out")
                continue
            if path is None:
                continue
            to.write(f"{REPORTS}/{name}", path.read_bytes())
        pages[key] = f"{REPORTS}/{name}"
    text = json.dumps(data | {"reports": pages}, separators=(",", ":"))
    to.write(DATA, f"window.vitflowSite = {text};\n".encode())
    templates = Environment(loader=FileSystemLoader([Path(__file__).parent, _STYLE]), keep_trailing_newline=True)  # noqa: S701 (they have no variables)
    for name in ("site.css", "site.js", "index.html"):
        to.write(name, templates.get_template(f"{name}.j2").render().encode())


def _folder(folder: Path) -> Place:
    try:
        names = {path.name for path in folder.iterdir()} if folder.exists() else set[str]()
        _check(str(folder), names)
        (folder / REPORTS).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RecipeError(f"--to {folder}: cannot write there: {error.strerror}") from None

    def put(name: str, data: bytes) -> None:
        path = folder / name
        temporary = path.with_name(f".{path.name}.part")
        temporary.write_bytes(data)
        temporary.replace(path)

    return Place({path.name for path in (folder / REPORTS).glob("*.html")}, put, str(folder / "index.html"))


def _bucket(uri: str) -> Place:
    def put(name: str, data: bytes) -> None:
        s3.put(f"{uri}/{name}", data, f"{_TYPES[name.rpartition('.')[2]]}; charset=utf-8")

    names = {remote.name for remote in s3.tree(uri)}
    _check(uri, {name for name in names if "/" not in name})
    return Place({name.removeprefix(f"{REPORTS}/") for name in names}, put, f"{uri}/index.html")


def _check(to: str, names: set[str]) -> None:
    """Raise RecipeError if a place has files of others; the data of a site that was interrupted may be missing."""
    if names - {REPORTS} and DATA not in names:
        raise RecipeError(f"--to {to}: there are other files; name an empty place, or one with an earlier site")
