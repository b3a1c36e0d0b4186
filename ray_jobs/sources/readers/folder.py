"""A user's own images: list the files, their labels and their splits.

In: a folder, a tar or zip of one, or s3://bucket/prefix, in one of three layouts.

    root/train/cat/1.jpg  root/test/cat/2.jpg     split folders of class folders; or every folder at the top contains
                                                  a split in its name (seg_train, seg_test), and one contains train
    root/cat/1.jpg        root/dog/2.jpg          class folders
    root/metadata.csv                             Hugging Face's imagefolder: tables of file_name, label, optionally
    root/site/metadata.jsonl                      split and a group that must stay in one split (a patient, a site), as
    root/train/metadata.parquet                   CSV, JSON lines or Parquet, in any folders

With `labels: false`, folders are not classes: images may be anywhere, and are in train unless split folders or the
tables say otherwise. With `boxes`, the annotations of objects say what an image shows (`ray_jobs.sources.boxes`);
with `mask_classes`, masks do (`ray_jobs.sources.folder_masks`).
Folders around the whole content of an archive are ignored.

Out: the entries, without opening an image.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from operator import itemgetter
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from pipelines.spec import FolderSource, quantity
from ray_jobs.data.boxes import Box
from ray_jobs.data.columns import SEVERAL
from ray_jobs.sources import folder_masks
from ray_jobs.sources.archives import containers, entries, roots
from ray_jobs.sources.archives.entries import Files, Member, Unusable
from ray_jobs.sources.boxes.folders import COCO_FILE, Read, annotated, image_sets, splits_of
from ray_jobs.sources.names import (
    SPLIT_WORDS,
    UNSUPPORTED,
    WITHOUT_SPLIT,
    around_splits,
    extensions,
    left_out_notes,
    listed,
    says_splits,
    split_folders,
    split_in,
    subject_note,
)
from ray_jobs.sources.readers.features import alike_note, check_labels, one_spelling
from ray_jobs.sources.readers.label_tables import (
    IMAGEFOLDER,
    OPTIONS,
    TABLES,
    Columns,
    check_tables,
    read_table,
)
from ray_jobs.sources.readers.misread import (
    check_class_folders,
    check_not_detection,
    check_not_inside,
    check_not_joined,
    check_not_masks,
    check_not_splits,
    unread_lists,
)
from vit_model.errors import UserError

EXTENSIONS = tuple(
    f".{name}" for name in ["avif", "bmp", "gif", "jfif", "jpeg", "jpg", "pgm", "png", "ppm", "tif", "tiff", "webp"]
)
_KINDS = {".parquet": "hf_parquet", "-ubyte": "idx", ".tar": "webdataset", "tfrecord": "tfds", "data_batch": "cifar"}
_AT_ONCE = 16
_MOST_BYTES = 2**30  # of a table or of annotations; COCO's train2017 has 470 MB
_UNLABELLED = "If the images have no labels, set source.labels: false"
_Labelled = tuple[str, tuple[str, ...], str | None, str | None]  # key, classes, split, group


class Entry(NamedTuple):
    """One image: its path relative to the root with "/", its class, its split if the layout gives one."""

    key: str
    label: int
    split: str | None
    group: str | None = None
    labels: list[int] | None = None
    """With several labels per image: all of them, ascending; `label` is then SEVERAL."""
    boxes: list[Box] | None = None
    boxes_width: int | None = None
    boxes_height: int | None = None
    """With boxes: the boxes of the image, and the size that they refer to, see `data.boxes.in_image`."""
    mask: str | None = None
    """With masks: the path of the image's mask."""
    objects: str | None = None
    """With masks that are drawn: what from, see `folder_masks.outlined`."""


class Listing(NamedTuple):
    """The content of a folder: entries sorted by key, sorted class names (none without labels), files left out."""

    class_names: tuple[str, ...]
    entries: tuple[Entry, ...]
    ignored: tuple[str, ...] = ()
    """Keys of files that are not images by their extension; hidden files are not listed."""
    notes: tuple[str, ...] = ()


def arrange(
    root: Path | str, files: Sequence[str], tables: Mapping[str, bytes], columns: Columns = IMAGEFOLDER
) -> Listing:
    """Return the labels and splits of the images in `files`, from `tables` or else from folders. Raises UserError."""
    try:
        return _arranged(root, files, tables, columns)
    except UserError as error:
        notes = () if tables or columns.label is None else unread_lists(files)
        raise UserError(". ".join((str(error), *notes))) from None


def _arranged(root: Path | str, files: Sequence[str], tables: Mapping[str, bytes], columns: Columns) -> Listing:
    files = sorted(files)
    images = _images(root, files)
    if tables:
        labelled, subjects = _from_tables(root, images, tables, columns)
    else:
        labelled, subjects = _without_tables(root, files, images, columns), []
    check_not_inside(root, [key for key, _, split, _ in labelled if split is None or not tables])
    used = {*images, *tables}
    ignored = tuple(key for key in files if key not in used)
    if columns.label is None:
        entries = tuple(Entry(key, 0, split or "train", group) for key, _, split, group in sorted(labelled))
        return Listing((), entries, ignored)
    spelled = one_spelling(name for _, names, _, _ in labelled for name in names)
    class_names = tuple(sorted(set(spelled.values())))
    check_labels(root, class_names)
    if tables:
        check_not_joined(root, class_names)
    if len(class_names) < 2:
        only, advice = f"only the class {class_names[0]!r}" if class_names else "no labels", _UNLABELLED
        if not tables and any("/" in f"/{key}".partition(f"/{class_names[0]}/")[2] for key in images):
            at_top = all(key.startswith(f"{class_names[0]}/") for key in images)
            inside = f"set the root to {str(root).rstrip('/')}/{class_names[0]}" if at_top else "move them up"
            advice = f"If the classes are the folders in it, {inside}"
        if any(key.lower().endswith(UNSUPPORTED) for key in files):
            advice = f"Its files are {extensions(files)}"
        raise UserError(f"{root} has {only}: a classifier needs two classes or more. {advice}")
    number = {name: label for label, name in enumerate(class_names)}
    numbered = [
        (key, sorted({number[spelled[name]] for name in names}), split, group)
        for key, names, split, group in sorted(labelled, key=itemgetter(0))
    ]
    entries = tuple(
        Entry(key, SEVERAL, split, group, labels) if columns.multi_label else Entry(key, labels[0], split, group)
        for key, labels, split, group in numbered
    )
    _check_given_splits(root, class_names, numbered)
    labels = {} if tables else {key: names[0] for key, names, _, _ in labelled}
    notes = (*check_class_folders(root, labels), *(() if tables else unread_lists(files)))
    notes += () if any(split for _, _, split, _ in labelled) else tuple(subjects)
    return Listing(class_names, entries, ignored, notes)


def _without_tables(root: Path | str, files: Sequence[str], images: Sequence[str], columns: Columns) -> list[_Labelled]:
    """Return the images with the labels that folders say. Raises UserError for a field that is about tables."""
    for option, column, default in zip((*OPTIONS, "multi_label"), columns, IMAGEFOLDER, strict=False):
        if column not in (None, default):
            raise UserError(
                f"{option}: {column!r} needs {', '.join(TABLES[:-1])} or {TABLES[-1]}, but {root} contains none"
            )
    if columns.label is None:
        return _without_labels(root, images)
    check_not_detection(root, files, images)
    check_not_masks(root, images)
    labelled = _from_folders(root, images)
    return [(key, (name,), split, None) for key, name, split in labelled]


def listing(source: FolderSource, files: Files) -> entries.Listing:
    """List every image below the root or in the archive.

    Raises:
        UserError: see `roots.files_of`, `arrange` and `boxes.folders.annotated`.
    """
    members, unusable, special, outside = _members(source, files)

    def read(keys: Sequence[str]) -> Iterator[bytes]:
        with ThreadPoolExecutor(_AT_ONCE) as threads:  # on S3, each file is a request
            yield from threads.map(lambda key: containers.read_member(files, members[key], _MOST_BYTES), keys)

    if source.masks is not None or source.boxes is not None:
        arranged = _with_annotations(source, sorted(members), read)
    elif source.mask_classes is not None:
        arranged = _with_masks(source.root, sorted(members), read)
    else:
        label = source.label_column if source.labels else None
        columns = Columns(source.image_column, label, source.group, source.multi_label, source.label_separator)
        tables = check_tables(source.root, members, EXTENSIONS)
        arranged = arrange(source.root, list(members), dict(zip(tables, read(tables), strict=True)), columns)
    rows = (
        entry._asdict()
        | entries.place(members[entry.key])
        | {"mask": None if entry.mask is None else entries.place(members[entry.mask])}
        for entry in arranged.entries
    )
    notes = _notes(arranged._replace(ignored=(*arranged.ignored, *outside)), special, source.has_masks)
    return entries.Listing(arranged.class_names, entries.table(rows), unusable=unusable, notes=notes)


def _members(
    source: FolderSource, files: Files
) -> tuple[dict[str, Member], tuple[Unusable, ...], tuple[str, ...], tuple[str, ...]]:
    """Return the files of a root by their paths below the folders around all images, and what is left out.

    What is left out: unusable files, special ones, and those outside these folders.
    """
    members, unusable, special, is_archive = roots.files_of(source.root, files)
    around = _around([*members], source.has_boxes or source.has_masks) if is_archive else ""
    return (
        {path.removeprefix(around): member for path, member in members.items() if path.startswith(around)},
        unusable,
        special,
        tuple(path for path in members if not path.startswith(around)),
    )


def _with_masks(root: Path | str, files: Sequence[str], read: Read) -> Listing:
    """Return the images that have masks, with the splits that their folders or lists name. Raises UserError."""
    images = _images(root, files)
    of_images = folder_masks.beside(images, files)
    if not of_images:
        example = "masks/train/1.png for images/train/1.jpg"
        raise UserError(f"{root}: source.mask_classes: no PNGs of masks, such as {example}")
    without = [key for key in images if key not in of_images and not folder_masks.is_mask(key)]
    listed_splits, notes = image_sets("Segmentation", files, of_images, read)
    splits = splits_of(of_images, listed_splits, {})
    found = tuple(Entry(key, 0, split, mask=of_images[key]) for key, split in splits.items())
    other = sorted(of_images.keys() - splits.keys())
    notes += left_out_notes({"without a mask": without, WITHOUT_SPLIT: other})
    return Listing((), found, notes=notes)


def _with_annotations(source: FolderSource, files: Sequence[str], read: Read) -> Listing:
    """Return the images that have annotations of boxes, or whose objects COCO's outline. Raises UserError."""
    root, form = source.root, source.boxes or "coco"
    try:
        found = annotated(form, files, _images(root, files), read)
        if source.mask_classes is not None:
            outlines = folder_masks.outlined(found.images, found.class_names, source.mask_classes)
            drawn = zip(found.images, outlines, strict=True)
            arranged = tuple(Entry(key, 0, found.splits[key], objects=objects) for key, objects in drawn)
            return Listing((), arranged, notes=found.notes)
    except UserError as error:
        field = "boxes" if source.masks is None else "masks"
        raise UserError(f"{root}: source.{field} {form}: {error}") from None
    with_boxes = []
    for key, (boxes, of, _) in found.images.items():
        labels = sorted({box.label for box in boxes if not box.ignored})
        with_boxes.append(Entry(key, SEVERAL, found.splits[key], None, labels, boxes, *(of or (None, None))))
    return Listing(found.class_names, tuple(with_boxes), notes=found.notes)


def _images(root: Path | str, files: Sequence[str]) -> list[str]:
    """Return the files that are images by their extensions. Raises UserError if there are none."""
    images = [key for key in files if PurePosixPath(key).suffix.lower() in EXTENSIONS]
    if not images:
        counts = f": {extensions(files)}" if files else ""
        kinds = [kind for form, kind in _KINDS.items() if any(form in key for key in files)]
        other = f". Read such files with source.kind: {' or '.join(map(repr, kinds))}" if kinds else ""
        raise UserError(f"{root} has no images ({', '.join(EXTENSIONS)}) among its {len(files)} files{counts}{other}")
    return images


def _notes(scanned: Listing, special: Sequence[str], has_masks: bool) -> tuple[str, ...]:
    notes = [*alike_note(scanned.class_names)] if scanned.class_names or has_masks else ["images without labels"]
    notes += scanned.notes
    if scanned.entries[0].boxes is not None:
        counts = [len(entry.boxes or ()) for entry in scanned.entries]
        notes.append(
            f"{quantity(sum(counts), 'box', 'boxes')} of objects, {sum(counts) / len(counts):.1f} per image on average;"
            f" {quantity(counts.count(0), 'image')} without any"
        )
    elif scanned.entries[0].labels is not None:
        labels = [len(entry.labels or ()) for entry in scanned.entries]
        notes.append(
            f"several labels per image: {sum(labels) / len(labels):.1f} on average; "
            f"{quantity(labels.count(0), 'image')} without labels"
        )
    versions = Counter(entry.key.partition(".rf.")[0] for entry in scanned.entries if ".rf." in entry.key)
    is_drawn = (scanned.class_names or has_masks) and not {"dev", "test"} <= {entry.split for entry in scanned.entries}
    if is_drawn and max(versions.values(), default=0) > 1:
        notes.append(
            f"Roboflow's versions of {quantity(len(versions), 'image')} ({next(iter(versions))}.rf.*): a draw puts "
            "them into different splits. Export without augmentation, or give train, valid and test"
        )
    if scanned.ignored:
        notes.append(
            f"{quantity(len(scanned.ignored), 'file')} left out, not images by their extensions: "
            f"{extensions(scanned.ignored)}"
        )
    if special:
        notes.append(
            f"{quantity(len(special), 'file')} left out, not regular files but FIFOs, sockets or devices, such as "
            f"{special[0]}"
        )
    return tuple(notes)


def _around(paths: Sequence[str], is_annotated: bool) -> str:
    """Return the folders around all images of an archive, such as "pets/images/"; they are not classes or splits.

    With `is_annotated`, around all of its files.
    """
    images = [PurePosixPath(path).parts[:-1] for path in paths if path.lower().endswith(EXTENSIONS)]
    tables = [
        PurePosixPath(path).parts[:-1]
        for path in paths
        if is_annotated or path.rpartition("/")[2] in TABLES or COCO_FILE.fullmatch(path)
    ]
    common: list[str] = []
    for parts in zip(*images, *tables, strict=False):
        if len(set(parts)) > 1 or parts[0].lower() in SPLIT_WORDS:
            break
        common.append(parts[0])
    return "".join(f"{part}/" for part in common)


def _from_folders(root: Path | str, images: Sequence[str]) -> list[tuple[str, str, str | None]]:
    """Return (key, class, split) of each image, by the names of its folders."""
    loose = [key for key in images if "/" not in key]
    if loose:
        raise UserError(
            f"{root} has images outside class folders, such as {loose[0]!r}. Put each class into its own folder. "
            f"{_UNLABELLED}"
        )
    splits = split_folders(images)
    if not splits:
        check_not_splits(root, {key.partition("/")[0] for key in images})
        return [(key, key.partition("/")[0], None) for key in images]
    others = sorted({key.partition("/")[0] for key in images} - set(splits))
    if others:
        raise UserError(
            f"{root} mixes split folders ({', '.join(splits)}) and other folders ({', '.join(others)}). Put class "
            "folders into a split folder, and move copies and images without labels out of the root; or, if these are "
            "classes, rename the first"
        )
    if len(set(splits.values())) < len(splits):
        raise UserError(f"{root} has two folders for one split: {', '.join(splits)}. Merge them, or move one out")
    around = around_splits(images, splits)
    labelled: list[tuple[str, str, str | None]] = []
    for key in images:
        top = key.partition("/")[0]
        label, slash, _ = key.removeprefix(around[top]).partition("/")
        if not slash:
            folders = {f"{each.rpartition('/')[0]}/" for each in images}
            are_flat = folders.issuperset(around.values())
            unlabelled = _UNLABELLED if are_flat else f"If {top} has no labels, move it out of the root"
            raise UserError(f"{root}: {key!r} is not in a class folder; move it to {top}/<class>/. {unlabelled}")
        labelled.append((key, label, splits[top]))
    return labelled


def _without_labels(root: Path | str, images: Sequence[str]) -> list[_Labelled]:
    """Return (key, no class, split, no group) of each image; the split is that of a split folder, or None."""
    check_not_masks(root, images)
    folders = split_folders(images)
    found: list[_Labelled] = [(key, (), folders.get(key.partition("/")[0]), None) for key in images]
    _check_all_or_none(root, found)
    return found


def _from_tables(
    root: Path | str, images: Sequence[str], tables: Mapping[str, bytes], columns: Columns
) -> tuple[list[_Labelled], list[str]]:
    """Return (key, class, split, group) from tables, which must list every image once; and notes about subjects.

    If a table has no column `split`, the split comes from the image's top folder, if that is a split folder.
    """
    present, found, folders = set(images), {}, split_folders(images)
    missing, subjects, cells = [], list[str](), defaultdict[tuple[str, str | None], list[object]](list)
    for path in sorted(tables):
        others: dict[str, list[object]] = {}
        for row in read_table(path, tables[path], columns, others):
            if row.key not in present:
                missing.append(row)
                continue
            if row.key in found:
                raise UserError(f"{row.where}: {row.key!r} is listed twice")
            inside = folders.get(row.key.partition("/")[0])
            split = inside if row.split is None else _split_named(row.split, row.where)
            found[row.key] = (row.key, row.labels, split, row.group)
        for column, each in others.items():
            cells[column, path if path.partition("/")[0] in folders else None] += each
    for (column, _), each in cells.items():
        if says_splits(column, each):
            raise UserError(
                f"{root}: the column {column!r} names splits ({listed(sorted({*map(str, each)}))}). Write them into a "
                "column split, as train, val or test, or remove it"
            )
        subjects += () if columns.group else subject_note(column, each)
    if missing:
        name = PurePosixPath(missing[0].key).name
        alike = [repr(key) for key in images if name in (PurePosixPath(key).name, PurePosixPath(key).stem)]
        raise UserError(
            f"{missing[0].where}: {root} has no image {missing[0].key!r}; {quantity(len(missing), 'row')} without an"
            f" image. {f'Did you mean {alike[0]}? ' if len(alike) == 1 else ''}Restore the files, or remove the rows"
        )
    if unlisted := sorted(present - found.keys()):
        raise UserError(
            f"{root}: {' with '.join(sorted(tables))} does not list {len(unlisted)} of {len(images)} images, "
            f"such as {unlisted[0]!r}. Add a row for each, or remove the images"
        )
    _check_all_or_none(root, found.values())
    return list(found.values()), subjects


def _check_all_or_none(root: Path | str, listed: Collection[_Labelled]) -> None:
    """Raise UserError if some of the images have a split and others do not."""
    drawn = [key for key, _, split, _ in listed if split is None]
    if 0 < len(drawn) < len(listed):
        raise UserError(
            f"{root}: some images have a split, others do not, such as {drawn[0]!r}. Put all into split folders "
            "(train, val, test), or give every table a column `split`"
        )


def _split_named(name: str, where: str) -> str:
    split = split_in(name)
    if split is None:
        raise UserError(f"{where}: unknown split {name!r}; expected one of: {', '.join(SPLIT_WORDS)}")
    return split


def _check_given_splits(
    root: Path | str,
    class_names: Sequence[str],
    numbered: Sequence[tuple[str, list[int], str | None, str | None]],
) -> None:
    if all(split is None for _, _, split, _ in numbered):
        return
    trained = {label for _, labels, split, _ in numbered if split == "train" for label in labels}
    untrained = [name for label, name in enumerate(class_names) if label not in trained]
    if untrained:
        raise UserError(
            f"{root}: the train split has no images of these classes: {', '.join(map(repr, untrained))}. Add some, or "
            "remove the classes"
        )
