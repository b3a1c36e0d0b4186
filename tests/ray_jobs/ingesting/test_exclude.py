"""Excluded images: they leave train and dev and nothing else moves; lists are read, or refused with what is wrong."""

import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from PIL import Image

from pipelines import identity
from pipelines.spec import FolderSource, Ingest
from pipelines.store import Layout, commit, open_store
from ray_jobs import ingest
from ray_jobs.data.columns import FACTS
from ray_jobs.data.images import Hashes
from ray_jobs.data.shards import open_dataset
from ray_jobs.evaluation.label_issues import FILE, LABEL_ISSUES, write_issues
from ray_jobs.ingesting.exclude import check_classes, exclude, read_list
from ray_jobs.process.context import Result
from tests.support.records import make_context, make_manifest
from vit_model.errors import UserError

NAMES = ("ant", "bee")
IMAGES = pa.table(
    {
        "key": ["a", "b", "c", "d", "e"],
        "sample_id": ["1", "2", "3", "4", "5"],
        "label": pa.array([0, 0, 1, 1, 1], pa.int32()),
        "split": ["train", "train", "train", "dev", "test"],
    }
)


def test_listed_images_leave_train_and_dev_but_not_test() -> None:
    is_out, table = exclude("x.csv", ["5", "4", "1", "1"], IMAGES, NAMES)
    assert is_out.to_pylist() == [True, False, False, True, False]
    assert [(row["key"], row["class_name"], row["split"], row["done"]) for row in table.to_pylist()] == [
        ("a", "ant", "train", "left out"),
        ("d", "bee", "dev", "left out"),
        ("e", "bee", "test", "kept"),
    ]
    assert "stays in test" in table["reason"][2].as_py()


def test_a_list_that_does_not_fit_is_refused() -> None:
    with pytest.raises(UserError, match=r"x.csv lists 2 ids that the source does not have: neither, no\. Remove"):
        exclude("x.csv", ["1", "no", "neither"], IMAGES, NAMES)


@pytest.mark.parametrize("gone", [["c"], ["a", "c"]])
def test_a_class_without_a_training_image_is_refused_whatever_took_the_others(gone: list[str]) -> None:
    """The list takes one of ant's two images, its copies in test the other."""
    listed = ["3"] if gone == ["c"] else ["2"]
    is_out, excluded = exclude("x.csv", listed, IMAGES, NAMES)
    index = IMAGES.filter(pc.invert(pc.or_(is_out, pc.is_in(IMAGES["key"], pa.array(gone)))))
    lost = "bee" if gone == ["c"] else "ant"
    with pytest.raises(UserError, match=f"x.csv leaves no training image of {lost}:"):
        check_classes("x.csv", excluded, index, NAMES)
    check_classes("x.csv", excluded, IMAGES, NAMES)


@pytest.mark.parametrize(
    ("data", "ids"),
    [
        (b"1\n2\n\n 3 \n", ["1", "2", "3"]),
        (b"\xef\xbb\xbfsample_id\r\n1\r\n2\r\n", ["1", "2"]),
        (b'file,sample_id,label\n"a, b.png",1,x\n\nc.png,2,y\n', ["1", "2"]),
        (b"sample_id\n", []),
        (b"", []),
    ],
)
def test_lists_are_read(data: bytes, ids: list[str]) -> None:
    assert read_list("x", data) == ids


@pytest.mark.parametrize("data", [b"file,label\na,b\n", b"file,sample_id\na\n", b"\xff\xfe", b'"1\n'])
def test_other_files_are_refused_by_name(data: bytes) -> None:
    with pytest.raises(UserError, match=r"exclude: wrong\.csv"):
        read_list("wrong.csv", data)


# ------------------------------------------------------------------------------------------------- the stage


def put_images(root: Path) -> None:
    for number in range(40):
        path = root / "ab"[number % 2] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        pixels = np.random.default_rng(number).integers(0, 256, (24, 20, 3), np.uint8)
        Image.fromarray(pixels).save(path)


def stage(root: Path, listed: Path | None = None) -> Ingest:
    fields: dict[str, Any] = {} if listed is None else {"exclude": str(listed)}
    return Ingest(job="ingest", source=FolderSource(kind="folder", root=str(root)), **fields)


def key(config: Ingest) -> str:
    return identity.stage_key(config, {}, identity.source_fingerprint(config))


def test_the_content_of_the_list_is_in_the_key_and_its_place_is_not(tmp_path: Path) -> None:
    put_images(tmp_path / "images")
    one, moved, other = (tmp_path / name for name in ("one.csv", "moved.csv", "other.csv"))
    one.write_text("sample_id\n1\n")
    shutil.copy(one, moved)
    other.write_text("sample_id\n2\n")
    keys = [key(stage(tmp_path / "images", listed)) for listed in (None, one, moved, other)]
    assert keys[1] == keys[2]
    assert len(set(keys)) == 3
    with pytest.raises(ValueError, match=re.escape(f"exclude: {tmp_path / 'gone'}: no such file")):
        key(stage(tmp_path / "images", tmp_path / "gone"))


def test_copies_may_not_take_what_a_list_leaves(tmp_path: Path) -> None:
    """The list takes one of two training images of a class, and the other is a copy of a test image."""
    put_images(tmp_path / "images")
    (tmp_path / "x.csv").write_text("sample_id\na/2\n")
    config = stage(tmp_path / "images", tmp_path / "x.csv")
    config = config.model_copy(update={"duplicates": "drop", "max_distance": None})
    context = make_context(open_store(str(tmp_path / "store")), config)
    keys = ["a/1", "a/2", "a/3", "b/1", "b/2", "b/3"]
    columns: dict[str, Any] = {field.name: pa.nulls(6, field.type) for field in FACTS}
    columns |= {
        "key": pa.array(keys),
        "sample_id": pa.array(keys),
        "content_id": pa.array(["test", "2", "test", "4", "5", "6"]),
        "label": pa.array([0, 0, 0, 1, 1, 1], pa.int32()),
        "split": pa.array(["test", "train", "train"] * 2),
        **{name: pa.array(range(6), pa.uint64()) for name in Hashes._fields},
    }
    images = pa.table([columns[field.name] for field in FACTS], names=FACTS.names)
    with pytest.raises(UserError, match="leaves no training image of a:"):
        ingest._decided(context, "x", images, ("a", "b"), ["train", "test"], ["a/2"])
    index, _, _ = ingest._decided(context, "x", images, ("a", "b"), ["train", "test"], ["b/2"])
    assert index["key"].to_pylist() == ["a/1", "a/2", "b/1", "b/3"]


@pytest.mark.parametrize(("agreement", "warns"), [(0.36, True), (0.9, False)])
def test_a_list_of_an_audit_by_a_hopeless_model_warns(
    agreement: float, warns: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = open_store(str(tmp_path / "store"))
    row = {"file": "a", "split": "train", "label": "ant", "suggested": "bee", "label_probability": 0.1}
    rows = [row | {"rank": 1, "sample_id": "1", "suggested_probability": 0.9}]
    with store.staging(Layout.files("audit", "audited", 1)) as staging:
        write_issues(staging.path / FILE, pa.Table.from_pylist(rows, LABEL_ISSUES))
    metrics = {"agreement": agreement, "largest_class": 0.1}
    commit(store, make_manifest("audit", key="audited", stage="doubtful", files=staging.files, metrics=metrics))
    context = make_context(store, stage(tmp_path))
    for listed in (None, ["2"], ["1", "2"]):
        ingest._warn_of_audits(context, listed)
    said = capsys.readouterr().out
    warning = "warning: audit doubtful (audited) lists 1 of the images of exclude: the model agrees with only 36.0%"
    assert (said.count("\n"), said.startswith(warning)) == (int(warns), warns)
    if warns:
        (store.local(Layout.files("audit", "audited", 1), staging.files) / FILE).write_bytes(b"damaged")
        ingest._warn_of_audits(context, ["1"])
        assert "cannot compare exclude with audit doubtful (audited): " in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.ray
def test_a_rebuilt_dataset_lacks_the_listed_images_and_moves_no_other(
    local_ray: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    put_images(tmp_path / "images")
    shutil.copy(tmp_path / "images/a/0.png", tmp_path / "images/b/copy.png")  # of another class

    store = open_store(str(tmp_path / "store"))

    def made(listed: Path | None = None) -> tuple[Result, dict[str, tuple[str, str]], Path]:
        config = stage(tmp_path / "images", listed)
        own, files = key(config), Layout.files("ingest", key(config), 1)
        context = make_context(store, config)
        result = ingest.main(replace(context, attempt=context.attempt.model_copy(update={"key": own})))
        fields = {
            "files": result.files,
            "config": context.attempt.config,
            "code": {"version": Ingest.VERSION},
        }
        commit(store, make_manifest(key=own, content_digest=result.content_digest, **fields))
        dataset = open_dataset(store.local(files, ()))
        rows = [row for split in ("train", "dev", "test") for row in dataset.index(split).to_pylist()]
        return result, {row["key"]: (row["split"], row["sample_id"]) for row in rows}, dataset.folder

    _, before, folder = made()
    assert not (folder / "excluded.parquet").exists()
    chosen = [next(key for key in sorted(before) if before[key][0] == split) for split in ("train", "dev", "test")]
    listed = tmp_path / "listed.txt"
    listed.write_text("\n".join(before[key][1] for key in chosen))
    result, after, folder = made(listed)
    assert before.keys() - after.keys() == {*chosen[:2]}
    assert all(before[key] == after[key] for key in after)
    assert result.metrics["excluded"] == 2
    said = "2 images left out of train and dev, because exclude lists them; 1 more that it lists are of test"
    out = capsys.readouterr().out
    assert "read 0 new images, reused 41" in out
    assert said in out and said in (folder / "card.md").read_text()
    assert sorted(pq.read_table(folder / "excluded.parquet")["key"].to_pylist()) == sorted(chosen)
