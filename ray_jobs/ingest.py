"""Ingest: turn a source into validated Parquet shards with fixed splits, and list what could not be used.

In: a source (`pipelines.spec.Source`). Out: a dataset artifact, see `ray_jobs.data.shards`, with

    quarantine.parquet    the images that cannot be used, and why
    duplicates.parquet    copies and near-copies, each with its twin, kept or left out (`ray_jobs.ingesting.splits`)
    excluded.parquet      with `exclude`, the images that it lists (`ray_jobs.ingesting.exclude`)
    set_aside.parquet     the images of classes without a training image (`ray_jobs.ingesting.splits`)
    card.md, card.json    a summary, with contact_sheet.jpg (`ray_jobs.ingesting.card`)
    masks/...             with `masks: true` of the source, the masks of each shard's images (`ray_jobs.data.masks`)
    facts/...             the facts of every image and its source file, for reuse (`ray_jobs.ingesting.reuse`)

The stage first lists the source, down to the byte range of every image in every archive. Then tasks read these ranges,
one shard per task, ordered by a hash of the images' names. Each image is read and decoded once, so a failure in a later
stage means that storage is damaged. The output depends on the source alone: neither on the number of tasks, nor on what
was reused from an earlier attempt. The memory of a task holds one row group of its shard (16 MB), the facts of the
shard, and what its source reads at once: an image, a row group of Parquet, a block of an array.

Plain Ray tasks are used and not Ray Data, because a part is the unit of work, of naming and of restarting. Ray Data
splits and merges its blocks as it likes, and its write_parquet chooses random file names.

    python -m ray_jobs.ingest --spec ATTEMPT.json
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import pairwise, repeat
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import xxhash
from numpy.typing import NDArray

from pipelines import identity
from pipelines.file_names import parts_of
from pipelines.files.digests import file_digests
from pipelines.files.sources import source_files
from pipelines.spec import Ingest, quantity
from pipelines.store import FileEntry, Layout, StoreError, all_manifests, local_files
from ray_jobs.data.columns import FACTS, LISTED, Sample
from ray_jobs.data.images import STORED_QUALITY, Facts, content_id, examine, examine_pixels, sample_id, shrunk
from ray_jobs.data.masks import Mask, StoredMask, check_mask, mask_file, write_masks
from ray_jobs.data.shards import (
    SPLITS,
    DatasetInfo,
    Shard,
    open_dataset,
    shard_file,
    shuffle_key,
    write_dataset,
    write_shard,
)
from ray_jobs.ingesting.card import card_shard, class_notes, copies_note, write_card
from ray_jobs.ingesting.exclude import EXCLUDED, check_classes, exclude, excluded_note, read_list
from ray_jobs.ingesting.reuse import (
    EarlierShards,
    Finished,
    Reusable,
    find_reusable,
    finished_parts,
    write_facts,
)
from ray_jobs.ingesting.splits import (
    CONFLICT,
    OtherSet,
    Trainable,
    assign_splits,
    find_copies,
    without_untrained,
)
from ray_jobs.process.context import AT_REST, Context, Result, SourceChangedError
from ray_jobs.process.progress import Progress
from ray_jobs.process.stage import run_stage
from ray_jobs.sources import catalog
from ray_jobs.sources.archives.blobs import open_blob
from ray_jobs.sources.archives.containers import outermost
from ray_jobs.sources.archives.entries import Bad, Files, Listing
from ray_jobs.sources.readers.features import counted, listed
from vit_model.errors import UserError

SHARD_BYTES = 256 * 2**20
SHARD_IMAGES = 8192  # a limit for small images: rendering a shard takes some seconds
NAMED = 10  # pairs of images with conflicting labels in the log and the notes; duplicates.parquet has all
# name of a local file -> (size, modification time); objects on S3 are requested by their ETag
States = dict[str, tuple[int, int]]


class Part(NamedTuple):
    """The entries of one shard: those with a hash of the key that begins with the `bits` bits of `number`."""

    bits: int
    number: int
    entries: pa.Table
    """ENTRIES, and the `digest` of each entry's source file."""


class Written(NamedTuple):
    """The output of a task: the shard (None: no image could be used), its files, FACTS of every entry."""

    shard: Shard | None
    files: tuple[FileEntry, ...]
    facts: pa.Table
    masks: dict[str, str]
    """sample_id -> the digest of the image's mask; empty without masks."""
    reused: int
    """The number of images that were not read again."""


def main(context: Context[Ingest]) -> Result:
    """List the source, write the shards, assign splits, write the index, the quarantine and the card.

    Raises:
        UserError: the source, or the list of excluded images, cannot be used.
        SourceChangedError: a file changed or went after the stage was planned.
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
    states = _states(files)  # taken before the digests, so that any later change is noticed
    listing = catalog.listing(config.source, files)
    for note in listing.notes:
        print(note, flush=True)
    _check_shrinkable(config, listing)
    listed = _read_excluded(config)
    _warn_of_audits(context, listed)
    entries = _with_digests(context, files, listing.entries)
    parts, finished = plan_parts(entries), finished_parts(context, entries["digest"])
    written = _in_tasks(_write_part, (context, files, states, finished), parts, "shard")
    context.check_source("while it was read")

    facts, reused = _numbered(written), sum(part.reused for part in written)
    print(f"read {quantity(len(facts) - reused, 'new image')}, reused {reused:,}", flush=True)
    bad = [*listing.bad, *_bad(facts)]
    with (
        context.staging() as staging
    ):  # first, so that users can read it if too many bad images fail the stage
        _write_quarantine(staging.path / "quarantine.parquet", bad)
    quarantine = staging.files
    _check_bad(context, bad, len(facts) + len(listing.bad))
    name = getattr(config.source, "name", config.source.kind)
    official = pc.unique(listing.entries["split"]).to_pylist()
    good = facts.filter(pc.is_null(facts["reason"]))
    index, copies, excluded = _decided(context, name, good, listing.class_names, official, listed)
    trainable = _trainable(index, listing)
    index = trainable.index
    corrected = index.filter(pc.is_valid(index["decoding"]))
    decided = (*_shrunk_note(config), *excluded_note(excluded), *_conflict_note(copies))
    for note in (*_composition(trainable, official), *decided, *class_notes(trainable, most=None)):
        print(note, flush=True)
    mask_classes = catalog.mask_classes(config.source)
    with context.staging() as staging:
        shards = [part.shard for part in written if part.shard]
        info = write_dataset(
            staging.path,
            name,
            trainable.class_names,
            listing.image,
            shards,
            index,
            (*listing.notes, *decided, *class_notes(trainable)),
            config.short_side,
            mask_classes,
            {name: digest for part in written for name, digest in part.masks.items()}
            if mask_classes
            else None,
            dict(zip(corrected["sample_id"].to_pylist(), corrected["decoding"].to_pylist(), strict=True)),
        )
        pq.write_table(copies, staging.path / "duplicates.parquet", compression="zstd")
        pq.write_table(trainable.set_aside, staging.path / "set_aside.parquet", compression="zstd")
        if config.exclude is not None:
            pq.write_table(excluded, staging.path / "excluded.parquet", compression="zstd")
    made = (*quarantine, *staging.files, *(file for part in written for file in part.files))
    card = _card(context, info, trainable, bad, copies, made)
    metrics: dict[str, float | int | str] = {
        "images": len(index),
        "classes": len(info.class_names),
        "quarantined": len(bad),
        "set_aside": len(trainable.set_aside),
        "copies": len(copies),
        "left_out": pc.sum(pc.equal(copies["done"], "left out")).as_py() or 0,
        **{str(split): info.splits[split] for split in SPLITS},
    }
    if config.exclude is not None:
        metrics["excluded"] = pc.sum(pc.equal(excluded["done"], "left out")).as_py() or 0
    return Result(info.content_digest, (*made, *card), metrics)


def _decided(
    context: Context[Ingest],
    name: str,
    images: pa.Table,
    class_names: tuple[str, ...],
    official: list[str | None],
    listed: list[str] | None,
) -> tuple[pa.Table, pa.Table, pa.Table]:
    """Return (FACTS of the images that are not left out, with their splits; DUPLICATES; EXCLUDED).

    Excluded images leave before copies are looked for, so that they take no twin along.
    """
    config = context.config
    splits = assign_splits(images, getattr(config.source, "salt", None), official)
    excluded = EXCLUDED.empty_table()
    if config.exclude is not None and listed is not None:
        is_out, excluded = exclude(config.exclude, listed, _with_splits(images, splits), class_names)
        images = images.filter(pc.invert(is_out))
        splits = [
            split for split, is_left_out in zip(splits, is_out.to_pylist(), strict=True) if not is_left_out
        ]
    others, store = {}, context.open_store()
    for other, manifest in zip(config.against, context.inputs.get("against", ()), strict=True):
        needed = [file for file in manifest.files if file.path in ("dataset.json", "index.parquet")]
        dataset = open_dataset(local_files(store, manifest, needed))
        others[other] = OtherSet(dataset.index("test"), dataset.info.class_names)
    copies = find_copies(name, images, class_names, splits, others, config.duplicates, config.max_distance)
    left_out = copies.filter(pc.equal(copies["done"], "left out"))
    counts = Counter(zip(*(copies[c].to_pylist() for c in ("kind", "done")), strict=True))
    for (kind, done), number in sorted(counts.items()):
        print(copies_note(number, kind, done), flush=True)
    index = _with_splits(images, splits)
    index = index.filter(pc.invert(pc.is_in(index["key"], left_out["key"].combine_chunks())))
    if config.exclude is not None:
        check_classes(config.exclude, excluded, index, class_names)
    return index, copies, excluded


def _read_excluded(config: Ingest) -> list[str] | None:
    if config.exclude is None:
        return None
    blob = open_blob([config.exclude])
    return read_list(config.exclude, blob.read(0, blob.size))


def _warn_of_audits(context: Context[Ingest], listed: Sequence[str] | None) -> None:
    """Print a line for every audit of this store that lists these images and is no evidence about labels."""
    from ray_jobs.evaluation.label_issues import FILE, doubts, read_issues  # which import scipy

    store = context.open_store()
    for manifest in all_manifests(store) if listed else ():
        if manifest.job != "audit" or (why := doubts(manifest.metrics)) is None:
            continue
        entry = [file for file in manifest.files if file.path == FILE]
        name = f"{manifest.stage} ({manifest.key[:12]})"
        try:
            issues = read_issues(store.local(manifest.folder, entry) / FILE)
        except (StoreError, UserError) as error:
            print(f"exclude was not compared with audit {name}: {error}", flush=True)
            continue
        if count := len(set(listed or ()) & set(issues["sample_id"].to_pylist())):
            print(f"warning: audit {name} lists {count:,} of the images of exclude: {why}", flush=True)


def _with_splits(images: pa.Table, splits: Sequence[str]) -> pa.Table:
    return images.set_column(images.schema.get_field_index("split"), "split", pa.array(splits, pa.string()))


# ------------------------------------------------------------------------------------------------- planning


def _with_digests(context: Context[Ingest], files: Files, entries: pa.Table) -> pa.Table:
    """Return the entries with the digest of each entry's source file.

    Rows of arrays, and archives that are split into several files, get one digest of all files. With `short_side` the
    digests are different, because the facts of images that are stored smaller differ from those of the originals.
    """
    everything = identity.files_fingerprint(files.items())  # not the attempt's, which covers `exclude`
    size = [context.config.short_side] if context.config.short_side else []
    digests = {
        name: identity.sha256(identity.canonical_json([*facts, *size]))
        for name, *facts in file_digests(files.items())
    }
    if size:
        everything = identity.sha256(identity.canonical_json([everything, *size]))
    named = entries["file"].combine_chunks().dictionary_encode()
    tops = [outermost(digests, name) for name in named.dictionary.to_pylist()]
    of_tops = [
        everything if len(parts_of(top, digests)) > 1 else digests.get(top, everything) for top in tops
    ]
    of_files = pa.array([digest[:32] for digest in of_tops], pa.string()).take(named.indices)
    of_rows = pa.array([everything[:32]] * len(entries), pa.string())
    return entries.append_column("digest", pc.if_else(pc.equal(entries["codec"], "row"), of_rows, of_files))


def _states(files: Files) -> States:
    states: States = {}
    for name, location in files.items():
        if not location.startswith("s3://"):
            with suppress(FileNotFoundError):  # a missing file has no state, which is a change as well
                status = Path(location).stat()
                states[name] = (status.st_size, status.st_mtime_ns)
    return states


def plan_parts(entries: pa.Table) -> list[Part]:
    """Divide entries into parts, one per shard, by a hash of their keys, so that every shard is a random sample.

    The number of parts is a power of two, and a part has one prefix of the hash: entries that arrive later do not move
    others to another part until there are twice as many. Entries of one unit are read together and stay together.
    """
    size = max(pc.sum(entries["length"]).as_py() or 0, 1)
    number = max(size / SHARD_BYTES, len(entries) / SHARD_IMAGES, 1)
    bits = math.ceil(math.log2(number))
    units = pc.coalesce(entries["unit"], entries["key"])
    hashes = _hashes(units)
    within = hashes if units.equals(entries["key"]) else _hashes(entries["key"])
    order = np.lexsort((within, hashes))
    numbers = (hashes[order] >> np.uint64(63 - bits)) >> np.uint64(1)
    starts = [0, *(np.flatnonzero(np.diff(numbers)) + 1).tolist(), len(entries)]
    ordered = entries.take(order)
    return [
        Part(bits, int(numbers[start]), ordered.slice(start, end - start))
        for start, end in pairwise(starts)
        if end > start
    ]


def _hashes(names: pa.ChunkedArray) -> NDArray[np.uint64]:
    return np.array([int.from_bytes(shuffle_key(name)[:8]) for name in names.to_pylist()], np.uint64)


# ------------------------------------------------------------------------------------------------- tasks


def _write_part(
    context: Context[Ingest], files: Files, states: States, finished: list[Finished], part: Part
) -> Written:
    """Read, check and write one shard (in a Ray task)."""
    facts: list[dict[str, Any]] = []
    file = shard_file(part.number)
    reusable = find_reusable(context, finished, part.bits, part.number, part.entries)
    masks: dict[str, StoredMask] = {}
    with EarlierShards(context) as earlier, context.staging() as staging:
        samples = _samples(context.config, files, part.entries, reusable, earlier, facts, masks)
        offsets = write_shard(staging.path / file, samples)
        if not offsets:
            (staging.path / file).unlink()
        if masks:
            write_masks(staging.path / mask_file(file), masks)
    good = [row for row in facts if "reason" not in row]
    for row, offset in zip(good, offsets, strict=True):
        row["offset"] = offset
    reused = sum(row.pop("is_reused", False) for row in good)
    table = pa.Table.from_pylist(facts, schema=FACTS)
    _check_unchanged(files, states, part.entries)
    written = next((one for one in staging.files if one.path == file), None)
    facts_files = write_facts(context, part.bits, part.number, table, written)
    shard = Shard(file=file, rows=len(offsets), bytes=written.size) if written else None
    digests = {name: mask.digest for name, mask in masks.items()}
    return Written(shard, (*staging.files, *facts_files), table, digests, reused)


def _check_unchanged(files: Files, states: States, entries: pa.Table) -> None:
    """Raise SourceChangedError if a file changed after its digest was computed: its facts would be wrong forever."""
    names = {outermost(files, name) for name in pc.unique(entries["file"]).to_pylist()}
    if not names <= files.keys() or any(len(parts_of(name, files)) > 1 for name in names):
        names = set(files)  # rows of arrays, archives of several files
    now = _states({name: files[name] for name in names})
    if changed := sorted(name for name in names if now.get(name) != states.get(name)):
        raise SourceChangedError(
            f"the source changed while it was read, after the run was planned ({files[changed[0]]}); {AT_REST}"
        )


def _samples(
    config: Ingest,
    files: Files,
    entries: pa.Table,
    reusable: Sequence[Reusable | None],
    earlier: EarlierShards,
    facts: list[dict[str, Any]],
    masks: dict[str, StoredMask],
) -> Iterator[Sample]:
    """Yield the usable images of a part, in order.

    Appends a row of FACTS to `facts` for every entry, and fills `masks` by sample_id, if the source has masks.
    """
    is_new = pa.array([one is None for one in reusable], pa.bool_())
    source = config.source
    new_images = catalog.images(source, files, entries.filter(is_new))
    mask_classes = catalog.mask_classes(source)
    # read again also for reused images, because they may be in another file, which may have changed
    own_masks = catalog.masks(source, files, entries) if mask_classes else repeat(None, len(entries))
    for number, (entry, before, mask) in enumerate(
        zip(entries.to_pylist(), reusable, own_masks, strict=True)
    ):
        listed = {column: entry[name] for column, name in LISTED.items()} | {"digest": entry["digest"]}
        row = dict(listed)
        facts.append(row)
        data = None if before is None else earlier.read(before)
        if before is not None and data is not None:
            row |= before.facts
            row["is_reused"] = True
        else:
            image = next(
                new_images if before is None else catalog.images(source, files, entries.slice(number, 1))
            )
            try:
                data, examined = _examined(image)
                digest = hashlib.sha256(
                    data
                ).digest()  # of the authors' bytes, even if the image is stored smaller
                if config.short_side is not None:
                    data, examined = shrunk(data, examined, config.short_side)
            except UserError as error:
                row["reason"] = str(error)
                continue
            row |= examined.columns()
            row |= {"content_id": content_id(digest), "sample_id": sample_id(digest, entry["key"])}
            row |= {"length": len(data), "checksum": xxhash.xxh3_64_intdigest(data)}
        if mask is not None:
            try:
                masks[row["sample_id"]] = _stored_mask(mask, row, len(mask_classes))
            except UserError as error:
                facts[-1] = listed | {"reason": f"mask: {error}"}
                continue
        yield Sample._make((row | {"image": data})[name] for name in Sample._fields)


def _examined(image: bytes | NDArray[np.uint8] | UserError) -> tuple[bytes, Facts]:
    """Return an image's bytes as they are stored, and its facts.

    Raises:
        UserError: the reason why the image cannot be used.
    """
    if isinstance(image, UserError):
        raise image
    if isinstance(image, bytes):
        return image, examine(image)
    return image.tobytes(), examine_pixels(image)


def _stored_mask(mask: Mask | UserError, row: dict[str, Any], num_classes: int) -> StoredMask:
    """Return the mask of the image that `row` is of. Raises UserError: the reason why it cannot be used."""
    if isinstance(mask, UserError):
        raise mask
    check_mask(mask, row["width"], row["height"], num_classes)
    return StoredMask.of(mask)


def _check_shrinkable(config: Ingest, listing: Listing) -> None:
    if config.short_side is not None and listing.image is not None:
        raise UserError(
            f"short_side is for image files; {config.source.kind} has arrays of pixels, which are stored unchanged. "
            "Remove short_side"
        )


def _shrunk_note(config: Ingest) -> tuple[str, ...]:
    if config.short_side is None:
        return ()
    return (
        f"images with a shorter side of more than {config.short_side} pixels are stored smaller, "
        f"as JPEG of quality {STORED_QUALITY}",
    )


def _conflict_note(copies: pa.Table) -> tuple[str, ...]:
    """Describe the images with the same bytes as an image of another class; from DUPLICATES."""
    rows = copies.filter(pc.equal(copies["kind"], CONFLICT)).to_pylist()
    if not rows:
        return ()
    pairs = {
        frozenset(
            {(row["key"], row["class"], row["split"]), (row["twin"], row["twin_class"], row["twin_split"])}
        )
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


def _in_tasks(
    function: Callable[..., Any], shared: Sequence[Any], each: Sequence[Any], noun: str
) -> list[Any]:
    """Return function(*shared, one) for each one, in order, computed in Ray tasks of one core."""
    import ray  # not at the top: the stage's process checks its --spec without it

    remote = ray.remote(num_cpus=1)(function)
    shared_references = [ray.put(value) for value in shared]  # sent once: there may be a million file names
    references = [remote.remote(*shared_references, one) for one in each]
    progress = Progress(len(references))
    pending = references
    while pending:
        _, pending = ray.wait(pending, timeout=1.0)
        done = len(references) - len(pending)
        if done and progress.due(done):
            progress.show(done, noun)
    return list(ray.get(references))


# ------------------------------------------------------------------------------------------------- all parts


def _numbered(written: Sequence[Written]) -> pa.Table:
    """Return the FACTS of all parts, with the number of each part's shard."""
    tables, number = [], 0
    for part in written:
        column = pa.array([number] * len(part.facts), pa.int32())
        tables.append(part.facts.set_column(FACTS.get_field_index("shard"), FACTS.field("shard"), column))
        number += part.shard is not None
    return pa.concat_tables(tables) if tables else FACTS.empty_table()


def _bad(facts: pa.Table) -> list[Bad]:
    rows = facts.filter(pc.is_valid(facts["reason"])).select(["key", "reason", "file", "place"])
    return [Bad(*row.values()) for row in rows.to_pylist()]


def _check_bad(context: Context[Ingest], bad: Sequence[Bad], total: int) -> None:
    attempt, allowed = context.attempt, context.config.max_bad_fraction
    if len(bad) > allowed * total:
        folder = f"{attempt.store_uri}/{Layout.files(attempt.job, attempt.key, attempt.number)}"
        first = "".join(f"\n  {one.key}: {one.reason}" for one in sorted(bad)[:20])
        more = f"\n  and {len(bad) - 20} more, in {folder}/quarantine.parquet" if len(bad) > 20 else ""
        raise UserError(
            f"{len(bad)} of {total} images cannot be used, more than max_bad_fraction {allowed}: "
            f"remove them or allow more{first}{more}"
        )


def _trainable(index: pa.Table, listing: Listing) -> Trainable:
    """Set aside the classes without a training image.

    Raises:
        UserError: fewer than two classes are left.
    """
    entries = listing.entries
    may_train = pc.or_kleene(pc.is_null(entries["split"]), pc.equal(entries["split"], "train"))
    labels = pc.unique(entries.filter(may_train)["label"]).to_pylist()
    trainable = without_untrained(index, listing.class_names, labels)
    if trainable.set_aside_classes and len(trainable.class_names) < 2:
        raise UserError(
            f"only {len(trainable.class_names)} of {len(listing.class_names)} classes have a usable training image; "
            "a classifier needs two or more. Add images, or give the splits yourself (split folders, or a "
            "column `split` in the metadata)"
        )
    return trainable


def _composition(trainable: Trainable, official: list[str | None]) -> tuple[str, str]:
    """Return lines for the log: the number of images of each split and of each class."""
    splits = Counter(trainable.index["split"].to_pylist())
    classes = Counter(trainable.index["label"].to_pylist())
    given = sorted(filter(None, official))
    named = f"given by the source: {', '.join(given)}" if given else "drawn"
    return (
        f"splits ({named}): {counted({split: splits[split] for split in SPLITS})}",
        f"classes: {counted({name: classes[label] for label, name in enumerate(trainable.class_names)})}",
    )


def _card(
    context: Context[Ingest],
    info: DatasetInfo,
    trainable: Trainable,
    bad: Sequence[Bad],
    copies: pa.Table,
    made: Sequence[FileEntry],
) -> tuple[FileEntry, ...]:
    """Write the dataset's card from the files that are already in the store."""
    shard = card_shard(trainable.index)
    needed = {"dataset.json", "index.parquet", info.shards[shard].file}
    attempt = context.attempt
    folder = context.open_store().local(
        Layout.files(attempt.job, attempt.key, attempt.number),
        [file for file in made if file.path in needed],
    )
    with context.staging() as staging:
        write_card(staging.path, open_dataset(folder), shard, bad, copies, trainable)
    return staging.files


def _write_quarantine(path: Path, bad: Sequence[Bad]) -> None:
    rows = sorted(bad)
    schema = pa.schema(
        [("key", pa.string()), ("reason", pa.string()), ("file", pa.string()), ("offset", pa.int64())]
    )
    pq.write_table(pa.Table.from_pylist([one._asdict() for one in rows], schema=schema), path)
    keys: dict[str, list[str]] = {}
    for one in rows:
        keys.setdefault(one.reason, []).append(one.key)
    for reason, of_reason in sorted(keys.items(), key=lambda item: -len(item[1])):
        print(f"quarantined {len(of_reason):,}: {reason}: {listed(of_reason)}", flush=True)


if __name__ == "__main__":
    run_stage("ingest")
