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
from pipelines.store import Manifest, Store, local_file

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
        RecipeError: the folder has other files.
        StoreError: the bucket cannot be listed.
    """
    return _bucket(to.rstrip("/")) if to.startswith("s3://") else _folder(Path(to))


def write(store: Store, data: dict[str, Any], reports: list[Manifest], to: Place) -> None:
    """Write a site with the data of `pipelines.pages.collect`, and the reports that it does not have yet."""
    pages = {}
    for report in reports:
        name = f"{report.key[:12]}.html"
        if name not in to.reports:
            path = local_file(store, report, "report.html")
            if path is None:
                continue
            to.write(f"{REPORTS}/{name}", path.read_bytes())
        pages[report.key[:12]] = f"{REPORTS}/{name}"
    text = json.dumps(data | {"reports": pages}, separators=(",", ":"))
    to.write(DATA, f"window.vitflowSite = {text};\n".encode())
    templates = Environment(loader=FileSystemLoader([Path(__file__).parent, _STYLE]), keep_trailing_newline=True)  # noqa: S701 (they have no variables)
    for name in ("site.css", "site.js", "index.html"):
        to.write(name, templates.get_template(f"{name}.j2").render().encode())


def _folder(folder: Path) -> Place:
    if folder.is_dir() and any(folder.iterdir()) and not (folder / DATA).exists():
        raise RecipeError(f"--to {folder}: the folder has other files; name a new one, or that of an earlier site")

    def put(name: str, data: bytes) -> None:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.part")
        temporary.write_bytes(data)
        temporary.replace(path)

    return Place({path.name for path in (folder / REPORTS).glob("*.html")}, put, str(folder / "index.html"))


def _bucket(uri: str) -> Place:
    def put(name: str, data: bytes) -> None:
        s3.put(f"{uri}/{name}", data, f"{_TYPES[name.rpartition('.')[2]]}; charset=utf-8")

    names = {remote.name for remote in s3.tree(f"{uri}/{REPORTS}")}
    return Place(names, put, f"{uri}/index.html")
