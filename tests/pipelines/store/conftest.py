"""A store in each place where one can be."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from pipelines.store import Store, open_store
from tests.support.s3 import used
from tests.support.stores import Folder, Place


@pytest.fixture(params=["folder", "moto", "ceph"])
def place(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    """An empty folder or bucket."""
    if request.param == "folder":
        yield str(tmp_path / "store"), Folder(tmp_path / "store")
        return
    with used(request.getfixturevalue(request.param), monkeypatch) as server:
        bucket = server.bucket()
        yield f"s3://{bucket.name}", bucket


@pytest.fixture
def store(place: Place) -> Store:
    return open_store(place[0])
