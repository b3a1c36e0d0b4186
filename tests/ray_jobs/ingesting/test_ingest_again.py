"""Ingest that was killed, or whose source grew, reads only what it has not read, and writes the same bytes."""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from pipelines import identity
from pipelines.recipe.pipeline import Pipeline
from pipelines.spec import FolderSource, HfParquetSource, Ingest
from pipelines.store import Layout, Manifest, Store, commit, open_store
from ray_jobs import ingest
from ray_jobs.data.images import DECODING
from ray_jobs.data.shards import SPLITS, open_dataset
from ray_jobs.data.writing import content_digest
from ray_jobs.ingesting.card import copies_note
from ray_jobs.ingesting.reuse import facts_file
from ray_jobs.process.context import Context, Result, SourceChangedError
from tests.support.archives import image
from tests.support.ingesting import in_tasks_here
from tests.support.prepared import put_parquet, put_tfds
from tests.support.records import make_attempt, make_context, make_manifest
from tests.support.s3 import Server, used
from vit_model.contract import Preprocessing


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ingest reads its parts in this process, without Ray."""
    monkeypatch.setattr(ingest, "in_tasks", in_tasks_here)


def put_images(root: Path, first: int, last: int) -> None:
    """Images of two classes, each a function of its number."""
    for number in range(first, last):
        pixels = np.random.default_rng(number).integers(0, 256, (24, 20, 3), np.uint8)
        path = root / "ab"[number % 2] / f"{number}.{'jpg' if number % 3 else 'png'}"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(path, quality=90)


def put_plain(path: Path, seed: int) -> None:
    """An image whose length does not depend on its pixels."""
    Image.fromarray(np.random.default_rng(seed).integers(0, 256, (24, 20, 3), np.uint8)).save(path)


def stage(root: Path) -> Ingest:
    return Ingest(job="ingest", source=FolderSource(kind="folder", root=str(root)), max_bad_fraction=0.5)


def context_of(store: Store, config: Ingest, number: int = 1, force: str = "") -> Context[Ingest]:
    source = identity.source_fingerprint(config)
    key = identity.stage_key(config, {}, source)
    attempt = make_attempt(
        key=identity.successor_key(key, force) if force else key,
        number=number,
        store_id=store.id,
        store_uri=store.uri,
        config=config.model_dump(mode="json"),
        source=source,
    )
    return Context(attempt, config, {})


def planned(store: Store, config: Ingest) -> Context[Ingest]:
    """As the driver plans the stage: the names of the source's files are recorded."""
    context = context_of(store, config)
    _, names = identity.listed_source(config)
    store.create(Layout.listing("ingest", context.attempt.key), json.dumps(names).encode())
    return context


def run(context: Context[Ingest]) -> Result:
    """The stage, committed."""
    result = ingest.main(context)
    attempt = context.attempt
    fields = {"key": attempt.key, "attempt": attempt.number, "files": result.files, "config": attempt.config}
    code = {"version": Ingest.VERSION}
    assert commit(context.open_store(), make_manifest(content_digest=result.content_digest, code=code, **fields))
    return result


def digests(result: Result) -> dict[str, str]:
    return {file.path: file.sha256 for file in result.files}


def said(text: str) -> tuple[int, int]:
    """How many images were read, and how many were reused."""
    [(new, known)] = re.findall(r"read ([\d,]+) new images?, reused ([\d,]+)", text)
    return int(new), int(known)


def test_what_a_killed_attempt_has_read_the_next_does_not_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("ray_jobs.ingesting.parts.SHARD_IMAGES", 2)
    put_images(tmp_path / "images", 0, 20)
    config, store = stage(tmp_path / "images"), open_store(str(tmp_path / "store"))

    def killed(do, shared, each, _):  # type: ignore[no-untyped-def]
        for one in each[:5]:
            do(*shared, one)
        raise RuntimeError("killed")

    monkeypatch.setattr(ingest, "in_tasks", killed)
    with pytest.raises(RuntimeError, match="killed"):
        ingest.main(context_of(store, config))
    monkeypatch.setattr(ingest, "in_tasks", in_tasks_here)
    again = ingest.main(context_of(store, config, number=2))
    new, known = said(capsys.readouterr().out)
    assert new + known == 20 and known > 0 < new
    assert again == ingest.main(context_of(open_store(str(tmp_path / "other")), config))


@pytest.mark.ray
def test_when_files_are_added_only_they_are_read(
    local_ray: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # 4 parts, then 8: the old ones are divided
    monkeypatch.setattr("ray_jobs.ingesting.parts.SHARD_IMAGES", 16)
    root = tmp_path / "images"
    put_images(root, 0, 60)
    put_plain(root / "a" / "plain.ppm", 1)
    (root / "a" / "bad.jpg").write_bytes(b"no image")
    config, store = stage(root), open_store(str(tmp_path / "store"))
    run(context_of(store, config))
    assert said(capsys.readouterr().out) == (62, 0)
    put_images(root, 60, 72)
    put_plain(root / "a" / "plain.ppm", 2)  # another image of the same length under an old name
    grown = run(context_of(store, config))
    assert said(capsys.readouterr().out) == (12 + 1 + 1, 60), "new ones, a changed one, the bad one"
    fresh = run(context_of(open_store(str(tmp_path / "other")), config))
    assert digests(grown) == digests(fresh)
    moved = shutil.move(root, tmp_path / "moved")
    assert digests(run(context_of(store, stage(Path(moved)), number=2))) == digests(grown)
    capsys.readouterr()
    forced = run(context_of(store, stage(Path(moved)), force="nonce"))
    assert said(capsys.readouterr().out) == (74, 0), "forced: everything is read again"
    assert digests(forced) == digests(fresh)


def test_of_several_folders_the_one_that_moved_is_known(
    tmp_path: Path, in_process: None, capsys: pytest.CaptureFixture[str]
) -> None:
    store = open_store(str(tmp_path / "store"))
    for number, name in enumerate(("first", "second", "third")):
        put_images(tmp_path / name, 20 * number, 20 * number + 20)
        run(context_of(store, stage(tmp_path / name)))
    for name in ("first", "third", "second"):
        moved = Path(shutil.move(tmp_path / name, tmp_path / f"{name} moved"))
        put_images(moved, 100, 102)
        capsys.readouterr()
        run(context_of(store, stage(moved)))
        assert said(capsys.readouterr().out) == (2, 20)


def test_only_images_that_a_decoder_reads_anew_change_their_set_also_if_they_are_reused(
    tmp_path: Path, in_process: None, capsys: pytest.CaptureFixture[str]
) -> None:
    root, store = tmp_path / "images", open_store(str(tmp_path / "store"))

    def digest() -> str:
        index = pa.concat_tables([dataset.index(split) for split in SPLITS]).to_pylist()
        samples = [(row["sample_id"], row["label"], row["split"], None) for row in index]
        ids = {row["sample_id"] for row in index if row["key"] == "a/deep.tif"}
        return content_digest("images", samples, ["a", "b"], decoding=dict.fromkeys(ids, DECODING))

    put_images(root, 0, 20)
    dataset = dataset_of(store, context_of(store, stage(root)))
    assert digest() == dataset.info.content_digest, "as without marks"
    white_is_zero = {262: 0}
    pixels = np.random.default_rng(0).integers(0, 2**16, (24, 20), np.uint16)
    Image.fromarray(pixels).save(root / "a" / "deep.tif", tiffinfo=white_is_zero)
    dataset = dataset_of(store, context_of(store, stage(root)))
    assert digest() == dataset.info.content_digest
    put_images(root, 20, 22)
    capsys.readouterr()
    dataset = dataset_of(store, context_of(store, stage(root)))
    assert said(capsys.readouterr().out) == (2, 21)
    assert digest() == dataset.info.content_digest


def dataset_of(store: Store, context: Context[Ingest]):  # type: ignore[no-untyped-def]
    run(context)
    return open_dataset(store.root / Layout.files("ingest", context.attempt.key, 1))  # type: ignore[attr-defined]


@pytest.mark.ray
def test_a_damaged_shard_is_not_used_again(local_ray: None, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    root, store = tmp_path / "images", open_store(str(tmp_path / "store"))
    put_images(root, 0, 20)
    first = context_of(store, stage(root))
    before = ingest.main(first)
    folder = tmp_path / "store" / Layout.files("ingest", first.attempt.key, 1)
    index = pq.read_table(folder / "index.parquet").to_pylist()
    shard = folder / "shards/00000.parquet"
    data = bytearray(shard.read_bytes())
    data[index[7]["offset"] + 3] ^= 1
    shard.write_bytes(data)
    capfd.readouterr()
    again = ingest.main(context_of(store, stage(root), number=2))
    assert again == before
    assert said(capfd.readouterr().out) == (1, 19)
    shard.unlink()
    (tmp_path / "store" / Layout.files("ingest", first.attempt.key, 2) / facts_file(0, 0)).unlink()
    assert ingest.main(context_of(store, stage(root), number=3)) == before
    assert said(capfd.readouterr().out) == (20, 0)
    facts = tmp_path / "store" / Layout.files("ingest", first.attempt.key, 3) / facts_file(0, 0)
    facts.write_bytes(facts.read_bytes()[:-20])
    assert ingest.main(context_of(store, stage(root), number=4)) == before
    assert said(capfd.readouterr().out)[0] > 0, "damaged facts say nothing"


@pytest.mark.parametrize("gone", [False, True])
def test_of_a_file_that_changes_while_it_is_read_nothing_is_remembered(
    gone: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It may be changed back, and its digest is then what it was: what was read between must not stand for it."""
    root, store = tmp_path / "images", open_store(str(tmp_path / "store"))
    put_images(root, 0, 20)
    file, other = root / "a" / "6.png", root / "b" / "9.png"
    own = file.read_bytes()

    def changed_meanwhile(do, shared, each, _):  # type: ignore[no-untyped-def]
        file.unlink() if gone else file.write_bytes(other.read_bytes())
        return [do(*shared, one) for one in each]

    monkeypatch.setattr(ingest, "in_tasks", changed_meanwhile)
    first = context_of(store, stage(root))
    with pytest.raises(ValueError, match=r"the source changed while it was read.*6\.png"):
        ingest.main(first)
    file.write_bytes(own)
    monkeypatch.setattr(ingest, "in_tasks", in_tasks_here)
    again = ingest.main(context_of(store, stage(root), number=2))
    assert said(capsys.readouterr().out) == (20, 0)
    assert again == ingest.main(context_of(open_store(str(tmp_path / "other")), stage(root)))


def test_files_that_come_while_the_stage_waits_or_reads_are_left_for_the_next_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    root, store = tmp_path / "images", open_store(str(tmp_path / "store"))
    put_images(root, 0, 20)
    waiting = planned(store, stage(root))

    def grown_meanwhile(do, shared, each, _):  # type: ignore[no-untyped-def]
        put_images(root, 30, 35)
        return [do(*shared, one) for one in each]

    monkeypatch.setattr(ingest, "in_tasks", in_tasks_here)
    before = ingest.main(context_of(open_store(str(tmp_path / "other")), stage(root)))
    put_images(root, 20, 30)
    (root / "c").mkdir()
    (root / "c" / "metadata.csv").write_text("not read before the next time")
    monkeypatch.setattr(ingest, "in_tasks", grown_meanwhile)
    assert ingest.main(waiting) == before
    (root / "c" / "metadata.csv").unlink()
    monkeypatch.setattr(ingest, "in_tasks", in_tasks_here)
    assert run(planned(store, stage(root))).metrics["images"] == 35

    waiting = planned(store, stage(root))
    (root / "a" / "6.png").unlink()
    with pytest.raises(SourceChangedError, match="the source changed before it was read"):
        ingest.main(waiting)


@pytest.mark.parametrize(
    ("source", "digest"),
    [
        ({"kind": "digits"}, "301a4c871319df1f219d1d9097ac72b29fd46e5cab4d26a7c142180c7132723f"),
        (
            {"kind": "glyphs", "images": 1000, "dev_images": 100},
            "f1919444b8f761e76a92bff8f2b370a8ada6ddc2faf9bbd556209f2cc3159f02",
        ),
        (
            {"kind": "shapes", "label": "shape", "images": 50, "seed": 0},
            "c82e2f81bc28407b987bbd1c333d11a0464f0cda3e109eb5fda396e76eb109a8",
        ),
    ],
)
def test_a_new_version_of_ingest_does_not_move_the_content_of_a_dataset(
    source: dict[str, object], digest: str, tmp_path: Path, in_process: None
) -> None:
    """Everything that was trained on it stays cached."""
    config = Ingest.model_validate({"job": "ingest", "source": source})
    assert ingest.main(make_context(open_store(str(tmp_path)), config)).content_digest == digest


def test_a_set_of_test_images_alone_has_its_card(tmp_path: Path, in_process: None) -> None:
    put_parquet(
        tmp_path / "data" / "test-00000-of-00001.parquet",
        [image(i) for i in range(9)],
        [i % 3 for i in range(9)],
    )
    source = HfParquetSource(kind="hf_parquet", root=str(tmp_path / "data"))
    context = make_context(open_store(str(tmp_path / "store")), Ingest(job="ingest", source=source))
    ingest.main(context)
    folder = tmp_path / "store" / Layout.files("ingest", context.attempt.key, 1)
    assert open_dataset(folder).info.splits == {"train": 0, "dev": 0, "test": 9}
    assert json.loads((folder / "card.json").read_text())["pixels"]["split"] == "test"


def test_the_same_on_s3(
    moto: Server,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    in_process: None,
) -> None:
    # the tasks of the module's Ray do not know this test's server
    root = tmp_path / "images"
    put_images(root, 0, 30)
    with used(moto, monkeypatch):
        store = open_store(f"s3://{moto.bucket().name}/again")
        run(context_of(store, stage(root)))
        put_images(root, 30, 34)
        capsys.readouterr()
        grown = run(context_of(store, stage(root)))
    assert said(capsys.readouterr().out) == (4, 30)
    assert digests(grown) == digests(run(context_of(open_store(str(tmp_path / "store")), stage(root))))


def test_test_images_of_others_are_left_out_and_listed(tmp_path: Path, in_process: None) -> None:
    store = open_store(str(tmp_path / "store"))
    put_images(tmp_path / "theirs", 0, 40)
    theirs = context_of(store, stage(tmp_path / "theirs"))
    their_test = set(dataset_of(store, theirs).index("test")["key"].to_pylist())
    put_images(tmp_path / "ours", 0, 80)
    config = stage(tmp_path / "ours").model_copy(update={"against": ("pets",)})
    manifest = Manifest.model_validate_json(store.read(Layout.manifest("ingest", theirs.attempt.key)))
    context = context_of(store, config)
    result = ingest.main(Context(context.attempt, config, {"against": (manifest,)}))
    ours = open_dataset(tmp_path / "store" / Layout.files("ingest", context.attempt.key, 1))
    used_to_learn = {*ours.index("train")["key"].to_pylist(), *ours.index("dev")["key"].to_pylist()}
    assert not used_to_learn & their_test
    rows = pq.read_table(ours.folder / "duplicates.parquet").to_pylist()
    assert {row["key"] for row in rows} == their_test
    assert {(row["twin_dataset"], row["twin_split"], row["kind"]) for row in rows} == {("pets", "test", "exact")}
    assert result.metrics["left_out"] == len([row for row in rows if row["done"] == "left out"])
    assert {row["split"] for row in rows if row["done"] == "kept"} <= {"test"}


def test_images_are_stored_smaller_under_the_same_names_and_in_the_same_splits(
    tmp_path: Path, in_process: None, capsys: pytest.CaptureFixture[str]
) -> None:
    root, store = tmp_path / "images", open_store(str(tmp_path / "store"))
    put_images(root, 0, 40)
    Image.new("RGB", (16, 9), "red").save(root / "a" / "small.png")
    whole = dataset_of(store, context_of(store, stage(root)))
    assert said(capsys.readouterr().out) == (41, 0)
    config = stage(root).model_copy(update={"short_side": 10})
    smaller = dataset_of(store, context_of(store, config))
    assert said(capsys.readouterr().out) == (41, 0), "of what is stored at its size nothing is known"
    assert smaller.info.content_digest != whole.info.content_digest
    assert "more than 10 pixels" in smaller.info.notes[-1] and smaller.info.short_side == 10
    for split in whole.info.splits:
        assert smaller.sample_ids(split) == whole.sample_ids(split)
        for row in smaller.index(split).to_pylist():
            is_small = row["key"] == "a/small.png"
            assert (row["width"], row["height"]) == ((16, 9) if is_small else (10, 12))
            assert row["format"] == ("png" if is_small else "jpeg")
    half = Preprocessing(mean=(0.5,) * 3, std=(0.5,) * 3, resolution=10, channels=3)
    assert smaller.images("train", half).shape == (smaller.info.splits["train"], 10, 10, 3)
    put_images(root, 40, 44)
    grown = dataset_of(store, context_of(store, config))
    assert said(capsys.readouterr().out) == (4, 41)
    assert grown.info.content_digest != smaller.info.content_digest


@pytest.mark.parametrize("kind", ["hf_parquet", "tfds"])
def test_images_out_of_records_are_stored_smaller(kind: str, tmp_path: Path, in_process: None) -> None:
    (tmp_path / "data").mkdir()
    if kind == "tfds":
        put_tfds(tmp_path / "data", "array_record")
    else:
        put_parquet(tmp_path / "data/train-00000-of-00001.parquet", [image(i) for i in range(40)], [0, 1] * 20)
    source = {"kind": kind, "root": str(tmp_path / "data")}
    config = Ingest.model_validate({"job": "ingest", "source": source}).model_copy(update={"short_side": 4})
    store = open_store(str(tmp_path / "store"))
    dataset = dataset_of(store, context_of(store, config))
    rows = [row for split in dataset.info.splits for row in dataset.index(split).to_pylist()]
    assert rows and all(min(row["width"], row["height"]) == 4 for row in rows)


def test_of_many_bad_images_all_are_listed_where_the_message_says(tmp_path: Path, in_process: None) -> None:
    put_images(tmp_path / "images", 0, 4)
    for number in range(30):
        (tmp_path / "images" / "a" / f"bad{number}.jpg").write_bytes(b"no image")
    store = open_store(str(tmp_path / "store"))
    with pytest.raises(
        ValueError,
        match=r"30 of 34 images.*--set .*\.max_bad_fraction=0\.89\n(.|\n)*and 10 more, in .*/quarantine\.parquet",
    ) as told:
        ingest.main(context_of(store, stage(tmp_path / "images")))
    listed = pq.read_table(str(told.value).rpartition(" in ")[2])
    assert len(listed) == 30 and set(listed["reason"].to_pylist()) == {"not an image"}


def test_arrays_of_pixels_are_not_stored_smaller(tmp_path: Path) -> None:
    source = {"kind": "shapes", "label": "colour", "images": 20, "dev_images": 2, "test_images": 4}
    config = Ingest.model_validate({"job": "ingest", "source": source, "short_side": 32})
    with pytest.raises(ValueError, match=r"shapes has arrays of pixels.*Remove short_side"):
        ingest.main(make_context(open_store(str(tmp_path / "store")), config))


def test_the_card_says_what_is_in_the_dataset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_process: None
) -> None:
    monkeypatch.setattr("ray_jobs.ingesting.parts.SHARD_IMAGES", 16)
    root, store = tmp_path / "images", open_store(str(tmp_path / "store"))
    put_images(root, 0, 60)
    (root / "b").rename(root / "<b>|c")
    (root / "a" / "bad.jpg").write_bytes(b"no image")
    shutil.copy(root / "a" / "4.jpg", root / "a" / "copy.jpg")
    context = context_of(store, stage(root))
    dataset = dataset_of(store, context)
    card = json.loads((dataset.folder / "card.json").read_text())
    assert (card["images"], card["splits"]) == (61, dataset.info.splits)
    counts = {one["name"]: one["train"] + one["dev"] + one["test"] for one in card["classes"]}
    assert counts == {"a": 31, "<b>|c": 30}
    assert card["formats"] == {"jpeg": 41, "png": 20}
    assert card["sizes"]["width"] == {"least": 20, "median": 20, "most": 20}
    assert card["quarantine"] == {"not an image": 1}
    assert card["copies"] == [{"kind": "exact", "done": "kept", "images": 1}]
    assert card["pixels"]["mean"] == pytest.approx([0.5] * 3, abs=0.02), "of random pixels"
    page = (dataset.folder / "card.md").read_text()
    assert "61 images of 2 classes" in page and "1 exact copy, kept" in page and "<b>" not in page
    with Image.open(dataset.folder / "contact_sheet.jpg") as sheet:
        sheet.load()
        assert (sheet.height, sheet.width % 114) == (2 * 114, 0), "a line a class, pictures of 112 pixels"


def test_images_of_12_bits_that_are_stored_in_16_are_told(tmp_path: Path, in_process: None) -> None:
    put_images(root := tmp_path / "images", 0, 20)
    for path in sorted(root.rglob("*.*")):
        Image.fromarray(np.random.default_rng(len(path.name)).integers(0, 2**12, (24, 20), np.uint16)).save(path, "PNG")
    store = open_store(str(tmp_path / "store"))
    dataset = dataset_of(store, context_of(store, stage(root).model_copy(update={"max_distance": None})))
    assert "is lighter than 15 of 255" in (dataset.folder / "card.md").read_text()


def test_classes_that_draw_no_training_image_are_set_aside_and_listed_once(
    tmp_path: Path, in_process: None, capsys: pytest.CaptureFixture[str]
) -> None:
    """Folders of one or two images: about 3 in 10 images draw dev or test."""
    root, store = tmp_path / "images", open_store(str(tmp_path / "store"))
    for number in range(60):
        (root / f"c{number % 40:02d}").mkdir(parents=True, exist_ok=True)
        put_plain(root / f"c{number % 40:02d}" / f"{number}.png", number)
    (root / "notes.txt").write_text("")
    dataset = dataset_of(store, context_of(store, stage(root)))
    log = capsys.readouterr().out
    assert len(dataset.info.notes) >= 3 and set(dataset.info.notes) <= set(log.splitlines())
    aside = pq.read_table(dataset.folder / "set_aside.parquet").to_pylist()
    lost = sorted({row["class_name"] for row in aside})
    assert 3 < len(lost) < 20 and len(dataset.info.class_names) == 40 - len(lost)
    assert all(row["key"].startswith(row["class_name"]) and row["split"] in ("dev", "test") for row in aside)
    assert set(dataset.labels("train").tolist()) == set(range(40 - len(lost)))
    for split in dataset.info.splits:
        for row in dataset.index(split).to_pylist():
            assert row["key"].startswith(dataset.info.class_names[row["label"]])
    [note] = [note for note in dataset.info.notes if "set aside" in note]
    assert f"{len(lost)} of 40 ({len(aside)} images)" in note
    assert all(note.count(repr(name)) == 1 for name in lost) and "split folders" in note
    assert any(note.startswith("classes without an image in dev: ") for note in dataset.info.notes)
    card = json.loads((dataset.folder / "card.json").read_text())
    assert [one["name"] for one in card["set_aside"]] == lost and "without a training image, set aside" in (
        dataset.folder / "card.md"
    ).read_text(), "bad images, of which too many fail a stage, they are not"
    assert not card["quarantine"]


def test_where_too_few_classes_have_a_training_image_ingest_says_so(tmp_path: Path, in_process: None) -> None:
    put_images(tmp_path / "images", 0, 40)
    for path in (tmp_path / "images" / "a").iterdir():
        path.write_bytes(b"no image")
    config = stage(tmp_path / "images")
    with pytest.raises(ValueError, match=r"only 1 of 2 classes have a usable training image; .* Add images"):
        ingest.main(context_of(open_store(str(tmp_path / "store")), config))


@pytest.mark.parametrize("duplicates", ["keep", "drop"])
def test_the_same_bytes_in_two_classes_are_named_in_the_log_the_notes_and_the_card(
    duplicates: str, tmp_path: Path, in_process: None, capsys: pytest.CaptureFixture[str]
) -> None:
    root, store = tmp_path / "images", open_store(str(tmp_path / "store"))
    put_images(root, 0, 40)
    first = dataset_of(store, context_of(store, stage(root)))
    train, test = (
        next(key for key in first.index(split)["key"].to_pylist() if key.startswith("a/"))
        for split in ("train", "test")
    )
    for key in (train, test):
        shutil.copy(root / key, root / "b" / f"copy of {key[2:]}")
    capsys.readouterr()
    config = stage(root).model_copy(update={"duplicates": duplicates})
    dataset = dataset_of(store, context_of(store, config))
    left_out = 2 if duplicates == "drop" else 0
    said = f"4 images have the same bytes as an image of another class ({left_out} of them left out): "
    [note] = dataset.info.notes
    assert note.startswith(said) and note in capsys.readouterr().out
    for key, split in (train, "train"), (test, "test"):
        assert f"{key} (a, {split}) and b/copy of {key[2:]} (b, {split})" in note
    assert said in (dataset.folder / "card.md").read_text().replace("\\", "")
    kept = {key for split in ("train", "dev", "test") for key in dataset.index(split)["key"].to_pylist()}
    assert ({train, f"b/copy of {train[2:]}"} <= kept) == (duplicates == "keep")
    assert {test, f"b/copy of {test[2:]}"} <= kept, "a test image is never left out"


def test_mirrored_copies_of_test_images_are_left_out_of_train(tmp_path: Path, in_process: None) -> None:
    root, store = tmp_path / "images", open_store(str(tmp_path / "store"))
    rng = np.random.default_rng(0)
    for number in range(40):
        coarse = Image.fromarray(rng.integers(0, 256, (9, 12, 3), np.uint8))
        path = root / "ab"[number % 2] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        coarse.resize((120, 90), Image.Resampling.BICUBIC).save(path)
    tested = dataset_of(store, context_of(store, stage(root))).index("test")["key"].to_pylist()
    for key in tested:
        with Image.open(root / key) as image:
            turned = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
            turned.save((root / key).with_suffix(".jpg"), quality=90)
            other = "b" if key.startswith("a") else "a"
            turned.save(root / other / f"of {Path(key).stem}.jpg", quality=80)
    dataset = dataset_of(store, context_of(store, stage(root)))
    rows = {row["key"]: row for row in pq.read_table(dataset.folder / "duplicates.parquet").to_pylist()}
    trained = {*dataset.index("train")["key"].to_pylist(), *dataset.index("dev")["key"].to_pylist()}
    assert tested and not trained & {str(Path(key).with_suffix(".jpg")) for key in tested}
    for key in tested:
        row = rows[f"{'b' if key.startswith('a') else 'a'}/of {Path(key).stem}.jpg"]
        if (row["twin"], row["split"]) == (key, "train"):
            assert (row["kind"], row["done"]) == ("mirrored", "kept"), "of another class: only listed"


def test_a_recipe_names_the_sets_whose_test_images_are_left_out() -> None:
    source = {"kind": "folder", "root": "/images"}
    pets = {"job": "ingest", "source": source}
    pipeline = Pipeline.model_validate({"name": "apart", "stages": {"all": pets | {"against": ["pets"]}, "pets": pets}})
    assert pipeline.order() == ("pets", "all")
    assert identity.identity_fields(pipeline.stages["all"])["against"] == ("pets",)
    fields = identity.identity_fields(pipeline.stages["pets"])
    assert not fields.keys() & {"against", "duplicates", "max_distance", "short_side"}, (
        "what came later is not in old keys"
    )
    with pytest.raises(ValueError, match=r"stages\.all\.against.*pet"):
        Pipeline.model_validate({"name": "apart", "stages": {"all": pets | {"against": ["pet"]}, "pets": pets}})


def test_copies_are_counted_in_words() -> None:
    assert copies_note(1, "cropped", "kept") == "1 cropped copy, kept"
    assert copies_note(2, "near", "left out") == "2 near copies, left out"
    assert copies_note(1_600, "conflicting labels", "kept") == "1,600 copies with conflicting labels, kept"
