"""gc on real stores: in a folder and on S3, deleting leaves the record of what replaces an artifact, and no more."""

from datetime import UTC, datetime, timedelta

from pipelines.engine.gc import Policy, collect
from pipelines.results.verify import verify
from pipelines.store import Layout, Store, input_ref, local_files, move_alias, open_record, read_manifest
from tests.support.records import committed
from tests.support.stores import Folder, Place

LONG_AGO = (datetime.now(UTC) - timedelta(days=90)).isoformat()


def test_deleting_leaves_what_is_needed_as_it_was_and_nothing_else(store: Store, place: Place) -> None:
    for key, rows in (("needed", b"1"), ("old", b"22")):
        with committed(store, "ingest", key, finished=LONG_AGO) as folder:
            (folder / "facts").mkdir()
            (folder / "facts/rows.parquet").write_bytes(rows)
    needed = read_manifest(store, "ingest", "needed")
    assert needed is not None
    move_alias(store, "frozen", input_ref(store, needed), 0, "person")
    there, of_old = place[1], Layout.artifact("ingest", "old")
    if isinstance(there, Folder):  # what a killed stage leaves
        there.write(f"{Layout.files('ingest', 'old', 2)}/.staging-1/rows.parquet", b"333")
    assert store.sizes(of_old) == there.objects(of_old)
    before = there.objects(Layout.artifact("ingest", "needed"))
    (unneeded,) = collect(store, Policy()).unneeded
    assert (unneeded.key, unneeded.bytes) == ("old", 2)
    (deleted,) = collect(store, Policy(), grace_hours=0).deleted
    assert (deleted.key, open_record(store)) == ("old", None)
    assert [*there.objects(of_old)] == [Layout.replaced("ingest", "old")]
    assert there.objects(Layout.artifact("ingest", "needed")) == before
    assert (local_files(store, needed) / "facts/rows.parquet").read_bytes() == b"1"
    assert not verify(store).damage
    found = collect(store, Policy(), grace_hours=0)
    assert (found.deleted, found.unneeded, found.record) == ((), (), None)


def test_the_open_record_says_when_its_artifacts_may_go(store: Store) -> None:
    with committed(store, "ingest", "old", finished=LONG_AGO):
        pass
    due = collect(store, Policy(), grace_hours=24).due
    assert due is not None
    assert datetime.fromisoformat(due) > datetime.now(UTC) + timedelta(hours=23)
    assert collect(store, Policy(), grace_hours=0).deleted == ()
    assert read_manifest(store, "ingest", "old") is not None
