"""Ingest: turn a source into validated Parquet shards with fixed splits, and list what could not be used.

In: a source (`pipelines.spec.Source`). Out: a dataset artifact, see `ray_jobs.data.shards`, with

    quarantine.parquet    the images that cannot be used, and why
    duplicates.parquet    copies and near-copies, each with its twin, kept or left out (`ray_jobs.ingesting.copies`)
    excluded.parquet      with `exclude`, the listed images (`ray_jobs.ingesting.exclude`)
    set_aside.parquet     the images of classes without a training image (`ray_jobs.ingesting.splits`)
    card.md, card.json    a summary, with contact_sheet.jpg (`ray_jobs.ingesting.card`)
    masks/...             the masks of each shard's images, if the source has masks (`ray_jobs.data.masks`)
    facts/...             the facts of every image and its source file, for reuse (`ray_jobs.ingesting.reuse`)

The stage first lists the source, down to the byte range of every image in every archive. Then tasks read these ranges,
one shard per task, ordered by a hash of the images' names. Each image is read and decoded once, so a failure in a later
stage means that storage is damaged. The output depends on the source alone, not on the number of tasks or on what was
reused from an earlier attempt. A task holds in memory one row group of its shard (16 MB), the facts of the shard, and
what its source reads at once: an image, a row group of Parquet, a block of an array.

The stage uses plain Ray tasks, because a part is the unit of work, of naming and of restarting. Ray Data splits and
merges its blocks as it likes, and its write_parquet chooses random file names.

    python -m ray_jobs.ingest --spec ATTEMPT.json
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pipelines.files.sources import source_files
from pipelines.spec import Ingest, quantity
from pipelines.store import FileEntry, Layout, StoreError, all_manifests, local_files
from ray_jobs.data.columns import CONFLICT, each_label, large, with_combinations
from ray_jobs.data.images import STORED_QUALITY
from ray_jobs.data.shards import SPLITS, DatasetInfo, open_dataset
from ray_jobs.data.writing import Description, write_dataset, write_rows
from ray_jobs.ingesting.card import card_shard, class_notes, copies_note, masks_note, write_card
from ray_jobs.ingesting.copies import DUPLICATES, OtherSet, find_copies
from ray_jobs.ingesting.exclude import EXCLUDED, check_classes, exclude, excluded_note, read_list
from ray_jobs.ingesting.parts import (
    Written,
    file_states,
    in_tasks,
    numbered,
    plan_parts,
    with_digests,
    write_part,
)
from ray_jobs.ingesting.reuse import finished_parts
from ray_jobs.ingesting.splits import SET_ASIDE, Trainable, assign_splits, without_untrained
from ray_jobs.process.context import Context, Result, SourceChangedError
from ray_jobs.process.stage import run_stage
from ray_jobs.sources import catalog
from ray_jobs.sources.archives.blobs import open_blob
from ray_jobs.sources.archives.entries import Listing, Unusable
from ray_jobs.sources.names import NAMED, counted, listed
from vit_model.errors import UserError


def main(context: Context[Ingest]) -> Result:
    """List the source, write the shards, assign splits, write the index, the quarantine and the card.

    Raises:
        UserError: the source, or the list of excluded images, cannot be used.
        SourceChangedError: a file changed or vanished after the stage was planned.
    """
    context.check_source("before it was read")
    try:
        return _dataset(context)
    except SourceChangedError:
        raise
    except (OSError, UserError):  # a file that changes while it is read can look damaged
        context.check_source("while it was read")
        raise


def _dataset(context: Context[Ingest]) -> Result:
    config, listed_files = context.config, context.listed()
    files = {
        name: str(place)
        for name, place in source_files(config.source).items()
        if listed_files is None or name in listed_files
    }
    states = file_states(files)  # taken before the digests, so that any later change is noticed
    listing = catalog.listing(config.source, files)
    for note in listing.notes:
        print(note, flush=True)
    _check_shrinkable(config, listing)
    listed = _read_excluded(config)
    _warn_of_audits(context, listed)
    entries = with_digests(context, files, listing.entries)
    parts, finished = plan_parts(entries), finished_parts(context, entries["digest"])
    written = in_tasks(write_part, (context, files, states, finished), parts, "shard")
    context.check_source("while it was read")

    facts, reused = numbered(written), sum(part.reused for part in written)
    print(f"read {quantity(len(facts) - reused, 'new image')}, reused {reused:,}", flush=True)
    bad = facts.filter(pc.is_valid(facts["reason"])).select(["key", "reason", "file", "place"])
    unusable = [*listing.unusable, *(Unusable(*row.values()) for row in bad.to_pylist())]
    # write it first, so that users can read it if the stage fails because of too many bad images
    with context.staging() as staging:
        _write_quarantine(staging.path / "quarantine.parquet", unusable)
    quarantine = staging.files
    _check_unusable(context, unusable, len(facts) + len(listing.unusable))
    name = getattr(config.source, "name", config.source.kind)
    official = pc.unique(listing.entries["split"]).to_pylist()
    usable = facts.filter(pc.is_null(facts["reason"]))
    index, copies, excluded = _decided(context, name, usable, listing.class_names, official, listed)
    trainable = _trainable(index, listing, config.source.has_several_labels)
    decided = (*_shrunk_note(config), *excluded_note(excluded), *_conflict_note(copies))
    decided += masks_note(catalog.mask_classes(config.source), sum((part.pixels for part in written), Counter[int]()))
    for note in (*_composition(trainable, official), *decided, *class_notes(trainable, most=None)):
        print(note, flush=True)
    notes = (*listing.notes, *decided, *class_notes(trainable))
    with context.staging() as staging:
        info = _write_index(staging.path, config, name, listing, trainable, written, notes)
        write_rows(staging.path / "duplicates.parquet", copies, DUPLICATES)
        write_rows(staging.path / "set_aside.parquet", trainable.set_aside, SET_ASIDE)
        if config.exclude is not None:
            write_rows(staging.path / "excluded.parquet", excluded, EXCLUDED)
    made = (*quarantine, *staging.files, *(file for part in written for file in part.files))
    card = _card(context, info, trainable, unusable, copies, made)
    metrics: dict[str, float | int | str] = {
        "images": len(trainable.index),
        "classes": len(info.class_names or info.mask_classes),
        "quarantined": len(unusable),
        "set_aside": len(trainable.set_aside),
        "copies": len(copies),
        "left_out": pc.sum(pc.equal(copies["done"], "left out")).as_py() or 0,
        **{str(split): info.splits[split] for split in SPLITS},
    }
    if config.exclude is not None:
        metrics["excluded"] = pc.sum(pc.equal(excluded["done"], "left out")).as_py() or 0
    return Result(info.content_digest, (*made, *card), metrics)


def _write_index(
    folder: Path,
    config: Ingest,
    name: str,
    listing: Listing,
    trainable: Trainable,
    written: Sequence[Written],
    notes: tuple[str, ...],
) -> DatasetInfo:
    """Write dataset.json and index.parquet."""
    corrected = trainable.index.filter(pc.is_valid(trainable.index["decoding"]))
    mask_classes = catalog.mask_classes(config.source)
    masks = {sample: digest for part in written for sample, digest in part.masks.items()}
    boxes = pa.concat_tables(part.boxes for part in written) if config.source.has_boxes else None
    return write_dataset(
        folder,
        Description(
            name,
            trainable.class_names,
            listing.image,
            notes,
            config.short_side,
            mask_classes,
            config.source.has_several_labels,
        ),
        [part.shard for part in written if part.shard],
        trainable.index,
        masks if mask_classes else None,
        dict(zip(corrected["sample_id"].to_pylist(), corrected["decoding"].to_pylist(), strict=True)),
        boxes,
    )


def _decided(
    context: Context[Ingest],
    name: str,
    images: pa.Table,
    class_names: tuple[str, ...],
    official: list[str | None],
    listed: list[str] | None,
) -> tuple[pa.Table, pa.Table, pa.Table]:
    """Return (FACTS of the images that are not left out, with their splits; DUPLICATES; EXCLUDED).

    Excluded images leave before the search for copies, so that no twin of theirs is left out.
    """
    config = context.config
    # without labels or masks, nothing is drawn
    salt = getattr(config.source, "salt", None) if class_names or config.source.has_masks else None
    splits = assign_splits(images, salt, official)
    named, names = with_combinations(images, class_names or ("",))
    excluded = large(EXCLUDED).empty_table()
    if config.exclude is not None and listed is not None:
        is_out, excluded = exclude(config.exclude, listed, _with_splits(named, splits), names)
        images, named = (table.filter(pc.invert(is_out)) for table in (images, named))
        splits = [split for split, is_left_out in zip(splits, is_out.to_pylist(), strict=True) if not is_left_out]
    others, store = {}, context.open_store()
    for other, manifest in zip(config.against, context.inputs.get("against", ()), strict=True):
        needed = [file for file in manifest.files if file.path in ("dataset.json", "index.parquet")]
        dataset = open_dataset(local_files(store, manifest, needed))
        others[other] = OtherSet(*with_combinations(dataset.index("test"), dataset.info.label_names))
    copies = find_copies(name, named, names, splits, others, config.duplicates, config.max_distance)
    left_out = copies.filter(pc.equal(copies["done"], "left out"))
    counts = Counter(zip(*(copies[c].to_pylist() for c in ("kind", "done")), strict=True))
    for (kind, done), number in sorted(counts.items()):
        print(copies_note(number, kind, done), flush=True)
    index = _with_splits(images, splits)
    index = index.filter(pc.invert(pc.is_in(index["key"], left_out["key"].combine_chunks())))
    if config.exclude is not None and not config.source.has_several_labels:
        check_classes(config.exclude, excluded, index, names)
    return index, copies, excluded


def _read_excluded(config: Ingest) -> list[str] | None:
    if config.exclude is None:
        return None
    blob = open_blob([config.exclude])
    return read_list(config.exclude, blob.read(0, blob.size))


def _warn_of_audits(context: Context[Ingest], listed: Sequence[str] | None) -> None:
    """Print a warning for every audit in this store that lists these images but is not evidence of wrong labels."""
    from ray_jobs.evaluation.label_issues import FILE, doubts, read_issues  # imports scipy

    store = context.open_store()
    for manifest in all_manifests(store, "audit") if listed else ():
        if (why := doubts(manifest.metrics)) is None:
            continue
        entry = [file for file in manifest.files if file.path == FILE]
        name = f"{manifest.stage} ({manifest.key[:12]})"
        try:
            issues = read_issues(store.local(manifest.folder, entry) / FILE)
        except (StoreError, UserError) as error:
            print(f"cannot compare exclude with audit {name}: {error}", flush=True)
            continue
        if count := len(set(listed or ()) & set(issues["sample_id"].to_pylist())):
            print(f"warning: audit {name} lists {count:,} of the images of exclude: {why}", flush=True)


def _with_splits(images: pa.Table, splits: Sequence[str]) -> pa.Table:
    return images.set_column(images.schema.get_field_index("split"), "split", pa.array(splits, pa.large_string()))


def _check_shrinkable(config: Ingest, listing: Listing) -> None:
    if config.short_side is not None and listing.image is not None:
        raise UserError(
            f"short_side applies to image files, but {config.source.kind} has arrays of pixels, which are stored "
            "unchanged. Remove short_side"
        )


def _shrunk_note(config: Ingest) -> tuple[str, ...]:
    if config.short_side is None:
        return ()
    return (
        f"images with a shorter side of more than {config.short_side} pixels are stored smaller, "
        f"as JPEG of quality {STORED_QUALITY}",
    )


def _conflict_note(copies: pa.Table) -> tuple[str, ...]:
    """Describe the images in DUPLICATES with the same bytes as an image of another class."""
    rows = copies.filter(pc.equal(copies["kind"], CONFLICT)).to_pylist()
    if not rows:
        return ()
    pairs = {
        frozenset({(row["key"], row["class"], row["split"]), (row["twin"], row["twin_class"], row["twin_split"])})
        for row in rows
    }
    named = [
        " and ".join(f"{key} ({label}, {split})" for key, label, split in sorted(pair))
        for pair in sorted(pairs, key=sorted)
    ]
    more = f"; and {len(named) - NAMED:,} more, see duplicates.parquet" if len(named) > NAMED else ""
    left_out = sum(row["done"] == "left out" for row in rows)
    return (
        f"{len(rows):,} images have the same bytes as an image of another class ({left_out:,} of them left out): "
        f"{'; '.join(named[:NAMED])}{more}",
    )


def _check_unusable(context: Context[Ingest], unusable: Sequence[Unusable], total: int) -> None:
    attempt, allowed = context.attempt, context.config.max_bad_fraction
    if len(unusable) > allowed * total:
        stage = attempt.stage.partition("@")[0]
        least = math.ceil(100 * len(unusable) / total) / 100
        folder = f"{attempt.store_uri}/{Layout.files(attempt.job, attempt.key, attempt.number)}"
        first = "".join(f"\n  {image.key}: {image.reason}" for image in sorted(unusable)[:20])
        more = f"\n  and {len(unusable) - 20} more, in {folder}/quarantine.parquet" if len(unusable) > 20 else ""
        raise UserError(
            f"{len(unusable)} of {total} images cannot be used, more than max_bad_fraction {allowed}. "
            f"Remove them, or allow them: --set {stage}.max_bad_fraction={least:g}{first}{more}"
        )


def _trainable(index: pa.Table, listing: Listing, multi_label: bool) -> Trainable:
    """Set aside the classes without a training image; with several labels per image, their images stay for the others.

    Raises:
        UserError: fewer than two classes are left.
    """
    if not listing.class_names or multi_label:
        return Trainable(index, listing.class_names, large(SET_ASIDE).empty_table())
    entries = listing.entries
    may_train = pc.or_kleene(pc.is_null(entries["split"]), pc.equal(entries["split"], "train"))
    labels = pc.unique(entries.filter(may_train)["label"]).to_pylist()
    trainable = without_untrained(index, listing.class_names, labels)
    if trainable.set_aside_classes and len(trainable.class_names) < 2:
        raise UserError(
            f"only {len(trainable.class_names)} of {len(listing.class_names)} classes have a usable training image; "
            "a classifier needs two or more. Add images, or define the splits (split folders, or a column `split` in "
            "the metadata)"
        )
    return trainable


def _composition(trainable: Trainable, official: list[str | None]) -> tuple[str, str]:
    """Return lines for the log: the number of images per split and per class."""
    splits = Counter(trainable.index["split"].to_pylist())
    classes = Counter(each_label(trainable.index).to_pylist())
    stated = sorted(filter(None, official))
    named = f"given by the source: {', '.join(stated)}" if stated else "drawn"
    by_class = {name: classes[label] for label, name in enumerate(trainable.class_names)}
    return (
        f"splits ({named}): {counted({split: splits[split] for split in SPLITS})}",
        f"classes: {counted(by_class) if by_class else 'none, because the images have no labels'}",
    )


def _card(
    context: Context[Ingest],
    info: DatasetInfo,
    trainable: Trainable,
    unusable: Sequence[Unusable],
    copies: pa.Table,
    made: Sequence[FileEntry],
) -> tuple[FileEntry, ...]:
    """Write the dataset's card from the files that are already in the store."""
    shard = card_shard(trainable.index)
    needed = {"dataset.json", "index.parquet", info.shards[shard].file}
    attempt = context.attempt
    folder = context.open_store().local(
        Layout.files(attempt.job, attempt.key, attempt.number), [file for file in made if file.path in needed]
    )
    with context.staging() as staging:
        write_card(staging.path, open_dataset(folder), shard, unusable, copies, trainable)
    return staging.files


def _write_quarantine(path: Path, unusable: Sequence[Unusable]) -> None:
    rows = sorted(unusable)
    schema = pa.schema([("key", pa.string()), ("reason", pa.string()), ("file", pa.string()), ("offset", pa.int64())])
    pq.write_table(pa.Table.from_pylist([image._asdict() for image in rows], schema=schema), path)
    keys: dict[str, list[str]] = {}
    for image in rows:
        keys.setdefault(image.reason, []).append(image.key)
    for reason, unusable_keys in sorted(keys.items(), key=lambda item: -len(item[1])):
        print(f"warning: quarantined {len(unusable_keys):,}: {reason}: {listed(unusable_keys)}", flush=True)
    if rows:
        print('all of them: vitflow report query "SELECT stage, key, reason FROM quarantine"', flush=True)


if __name__ == "__main__":
    run_stage("ingest")
