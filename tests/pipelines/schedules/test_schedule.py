"""Schedules in the store and on the command line; what is due is in test_due.py."""

from pathlib import Path
from typing import Any

import pytest

from pipelines.schedules.schedule import (
    Schedule,
    add_schedule,
    all_schedules,
    find_schedule,
    read_schedule,
    set_state,
)
from pipelines.spec import RecipeError
from pipelines.store import StoreError, encode, now, open_store
from pipelines.store.folder import FolderStore
from tests.support.paths import TINY
from tests.support.schedules import DIGITS


def make_schedule(**fields: Any) -> Schedule:
    defaults: dict[str, Any] = {"name": "often", "pipeline": DIGITS, "recipe": "one.yaml"}
    return Schedule(**defaults | {"cron": "* * * * *"} | fields)


def test_a_schedule_is_added_replaced_paused_resumed_and_removed_and_nothing_is_overwritten(
    tmp_path: Path,
) -> None:
    store = open_store(str(tmp_path / "s"))
    folder = tmp_path / "s" / "schedules" / "often"
    assert add_schedule(store, make_schedule()) == "added"
    assert add_schedule(store, make_schedule()) == "unchanged"
    before = (folder / "1.json").read_bytes()
    assert add_schedule(store, make_schedule(cron="0 3 * * *")) == "replaced"
    assert set_state(store, "often", "paused")
    assert not set_state(store, "often", "paused")
    assert find_schedule(store, "often").state == "paused"
    assert set_state(store, "often", "active")
    assert find_schedule(store, "often").cron == "0 3 * * *"
    assert set_state(store, "often", "removed")
    assert all_schedules(store) == []
    with pytest.raises(RecipeError, match="there are: none"):
        find_schedule(store, "often")
    assert add_schedule(store, make_schedule()) == "added"
    assert sorted(path.name for path in folder.glob("*.json")) == [f"{n}.json" for n in range(1, 7)]
    assert (folder / "1.json").read_bytes() == before


def test_the_tenth_change_comes_after_the_ninth(tmp_path: Path) -> None:
    store = open_store(str(tmp_path / "s"))
    for minute in range(12):
        add_schedule(store, make_schedule(cron=f"{minute} * * * *"))
    assert find_schedule(store, "often").cron == "11 * * * *"


def test_of_two_who_change_a_schedule_at_once_one_is_told(tmp_path: Path) -> None:
    class Late(FolderStore):
        """One whose writes always come second."""

        def create(self, name: str, data: bytes) -> bool:
            if name.startswith("schedules/"):
                FolderStore.create(self, name, encode(make_schedule(cron="1 1 1 1 *", time=now())))
            return super().create(name, data)

    store = Late(tmp_path / "s")
    with pytest.raises(StoreError, match="another process has just changed the schedule often"):
        add_schedule(store, make_schedule())
    assert find_schedule(store, "often").cron == "1 1 1 1 *"


@pytest.mark.parametrize("name", ["", "Often", "../x", "a/b", "1a", "a" * 42, "a\n"])
def test_what_is_no_name(tmp_path: Path, name: str) -> None:
    with pytest.raises(RecipeError, match="is not a valid schedule name"):
        find_schedule(open_store(str(tmp_path / "s")), name)


def test_a_damaged_schedule_is_told_by_name(tmp_path: Path) -> None:
    store = open_store(str(tmp_path / "s"))
    add_schedule(store, make_schedule())
    store.create("schedules/often/2.json", b'{"name": "often", "cron": "99 * * * *"}')
    with pytest.raises(StoreError, match=r"schedules/often/2\.json is damaged"):
        read_schedule(store, "often")


def test_wrong_requests_from_the_command_line_write_nothing(vitflow_here, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    add = ("schedule", "add", "weekly", TINY, "--store", tmp_path / "s", "--cron")
    done = vitflow_here(*add, "0 3 * * MOM", "--timezone", "Europe/Berlin", check=2)
    assert "'0 3 * * MOM': Bad day-of-week; expected" in done.stderr
    done = vitflow_here(*add, "0 3 * * 1", "--timezone", "Europe/Berln", check=2)
    assert "'Europe/Berln': no such time zone" in done.stderr
    done = vitflow_here(*add, "0 3 * * 1", "--address", "http://head:8265", check=2)
    assert "which only this machine sees" in done.stderr
    assert not (tmp_path / "s").exists()
