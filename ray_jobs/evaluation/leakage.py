"""Detection of test images that a backbone was trained on, before a stage computes anything.

In: a stage's context and the images that it learns from. Out: `Overlap`, or a UserError if its backbone was trained on
test images.

A model's lineage says what it was trained on: the manifests of the model and its ancestors (a fine-tuning's backbone, a
pretraining's `init_from` and `teacher`) name their data sets, and `index.parquet` lists the images. A pretraining uses
train. The stored model of a fine-tuning was fitted on draw 0, or with all labels on train and dev. Imported weights
with the same bytes as a model in the store have that model's lineage. If the store has only the data set that their
contract names, all of its train and dev count, and their ancestors are unknown. The training images of other weights,
and of data sets without a manifest or an index, are unknown; the log and the artifact's metrics say so.

Two images are equal if their bytes are (`content_id`). Test images that the data set also has in train or dev, in its
authors' splits, are counted but not refused, because any model trained on that data set has seen them. Near-copies are
only counted, because small pictures can look alike without being copies. But if ingest left copies of a new test image
out of train, and an ancestor was trained on them before, the image counts as seen. It is scored apart and never
refused, because nobody could have left the copies out of an earlier training.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from pipelines.spec import (
    BACKBONE_FIELDS,
    FINE_TUNED,
    TRAINED,
    WITHOUT_LABELS,
    AnyStage,
    Evaluate,
    Finetune,
    Ingest,
    Labels,
    Segment,
)
from pipelines.store import (
    InputRef,
    Manifest,
    Store,
    all_manifests,
    contract_of,
    local_file,
    read_current,
    read_manifest,
)
from ray_jobs.data.columns import large
from ray_jobs.data.near_duplicates import is_near
from ray_jobs.data.shards import Dataset
from ray_jobs.evaluation.supports import support_rows
from ray_jobs.process.context import Context
from vit_model.contract import WEIGHTS_FILE
from vit_model.errors import UserError

# Rows use these names for a backbone that was trained on other images, and for one that was trained on these images.
PRETRAINED, SEEN = "pretrained", "trained on these images"
COMPARED = ["content_id", "phash"]  # columns of an index
_INDEX = "index.parquet"
_READ = [*COMPARED, "split", "label"]
_MAX_DISTANCE: int = Ingest.model_fields["max_distance"].default  # bits between near-copies


class Training(NamedTuple):
    """The training images of a model or of one of its ancestors."""

    stage: str
    """The model's stage, job and key, for messages."""
    data: str
    """The data set's stage, job and key."""
    images: pa.Table
    """The columns COMPARED of the images."""
    uses_labels: bool = True


class Overlap(NamedTuple):
    """The overlap of test images with the training images of the backbone, of its ancestors and of the stage itself."""

    seen: NDArray[np.bool_]
    """[n], per test image: whether the backbone or an ancestor was trained on it and the data set has it only in test,
    or was trained on a copy that ingest left out of train because of it."""
    also_in_train: int
    """Test images equal to a training image that the data set also has in train or dev."""
    near_copies: int
    """Test images with a perceptual hash near a training image's, but not seen and equal to no training image."""
    labels_seen: int
    """Labelled images of this stage that the backbone or an ancestor was trained on."""
    unknown: tuple[str, ...] = ()
    """The models in the lineage whose training images are unknown."""

    @property
    def metrics(self) -> dict[str, float | int | str]:
        """The counts in an artifact's metrics."""
        counts: dict[str, float | int | str] = {
            "test_images_seen_in_training": int(self.seen.sum()),
            "test_images_also_in_train": self.also_in_train,
            "test_images_near_training_images": self.near_copies,
            "labelled_images_seen_in_training": self.labels_seen,
        }
        return counts | ({"unknown_training": ", ".join(self.unknown)} if self.unknown else {})


def check_leakage(context: Context[AnyStage], dataset: Dataset, labelled: pa.Table) -> Overlap:
    """Compare a stage's test and labelled images with the training images of its backbone, if it has one.

    Args:
        context: the stage's context.
        dataset: the artifact that `data` names.
        labelled: the rows of its index that the stage is fitted on.

    Raises:
        UserError: the backbone was trained on test images and `seen_in_training` is "fail", or an index is damaged.
        StoreError: the store cannot be read.
    """
    trainings, unknown, named = read_trainings(context.open_store(), context.inputs.get("backbone", ()))
    test = dataset.index("test").select(COMPARED)
    not_test = pa.concat_tables([dataset.index(split).select(["content_id"]) for split in ("train", "dev")])
    images = [training.images for training in trainings]
    overlap = find_overlap(test, not_test, labelled, images)
    config = context.config  # only stages with a backbone can have seen images
    if overlap.seen.any() and isinstance(config, Evaluate | Finetune | Segment) and config.seen_in_training == "fail":
        raise UserError(_refusal(config, test, overlap, trainings))
    if unknown and dataset.info.content_digest in named:
        overlap = overlap._replace(labels_seen=len(labelled))
    overlap = overlap._replace(unknown=tuple(unknown))
    pushed = _copies_seen(context, dataset, images) & ~overlap.seen
    if pushed.any():
        others = find_overlap(test.filter(pa.array(~pushed)), not_test, labelled, images)
        overlap = overlap._replace(seen=overlap.seen | pushed, near_copies=others.near_copies)
    for line in log_lines(overlap):
        print(line, flush=True)
    return overlap


def seen_or_near(
    context: Context[AnyStage], dataset: Dataset, models: Sequence[Manifest]
) -> tuple[NDArray[np.bool_], tuple[str, ...]]:
    """Return which test images [n] one of the models or an ancestor was trained on, also as a near-copy.

    Returns:
        Them, and the models whose training images are unknown.

    Raises:
        UserError: an index is damaged.
        StoreError: the store cannot be read.
    """
    trainings, unknown, _ = read_trainings(context.open_store(), models)
    test, images = dataset.index("test").select(COMPARED), [training.images for training in trainings]
    hashes = test["phash"].to_numpy()
    trained = np.concatenate([hashes[:0], *(table["phash"].to_numpy() for table in images)])
    seen = _is_in_any(test, images) | _are_near(hashes, trained) | _copies_seen(context, dataset, images)
    return seen, tuple(dict.fromkeys(unknown))


def check_labels_unseen(context: Context[AnyStage], dataset: Dataset, audited: pa.Table) -> tuple[str, ...]:
    """Check that an audit's backbone was not trained on the audited labels, because it would repeat the wrong ones.

    Training without labels is allowed on any images.

    Args:
        audited: the rows of the index of the artifact that `data` names.

    Returns:
        The models in the backbone's lineage whose training images are unknown.

    Raises:
        UserError: the backbone or an ancestor was trained on labels of these images, or an index is damaged.
    """
    models = context.inputs.get("backbone", ())
    trainings, unknown, named = read_trainings(context.open_store(), models)
    with_labels = [training for training in trainings if training.uses_labels]
    seen = int(_is_in_any(audited, [training.images for training in with_labels]).sum())
    by = _counts(audited, with_labels)
    if not seen and unknown and dataset.info.content_digest in named:
        seen, by = len(audited), "by the contract of its weights"
    if seen:
        raise UserError(
            f"backbone {models[0].stage}: trained on the labels of {seen:,} of the {len(audited):,} images to audit"
            f" ({by}), so it repeats their wrong labels. Use a backbone that was trained without labels or on other"
            " images, or cross_validation with a model to train from scratch and without a backbone"
        )
    for name in unknown:
        print(
            f"{name}: training images unknown; if it was trained on these labels, wrong ones are missed",
            flush=True,
        )
    return tuple(unknown)


def _counts(images: pa.Table, trainings: Sequence[Training]) -> str:
    """Return in words how many of these images each training has seen."""
    counts = [(training, int(_is_in_any(images, [training.images]).sum())) for training in trainings]
    return "; ".join(f"{count:,} by {training.stage} on {training.data}" for training, count in counts if count)


def log_lines(overlap: Overlap) -> list[str]:
    """Describe an overlap, one line per kind."""
    total, seen, near = len(overlap.seen), int(overlap.seen.sum()), overlap.near_copies
    count = f"{seen:,} of {total:,}"
    if overlap.unknown:
        count = f"at least {count}" if seen else "unknown"
    lines = [f"test images seen in training: {count}; near-copies of training images: {near:,} more"]
    if overlap.also_in_train:
        lines.append(f"test images that the data set also has in train or dev: {overlap.also_in_train:,}")
    if overlap.labels_seen:
        lines.append(f"labelled images that the backbone was trained on: {overlap.labels_seen:,}")
    lines += [f"{name}: training images unknown, so not counted" for name in overlap.unknown]
    return lines


def _refusal(
    config: Evaluate | Finetune | Segment, test: pa.Table, overlap: Overlap, trainings: Sequence[Training]
) -> str:
    by = _counts(test.filter(pa.array(overlap.seen)), trainings)
    return (
        f"backbone {config.backbone}: trained on {overlap.seen.sum():,} of the {len(test):,} test images of"
        f" {config.data} ({by}). Set `against: [{config.data}]` in the ingest of the training data, which leaves these"
        " images out, and retrain; or set `seen_in_training: report` in this stage, which scores them separately"
    )


# ------------------------------------------------------------------------------------------------- comparing


def find_overlap(test: pa.Table, not_test: pa.Table, labelled: pa.Table, trainings: Sequence[pa.Table]) -> Overlap:
    """Compare a data set's images with the images used in training.

    Args:
        test: the columns COMPARED of the test images.
        not_test: `content_id` of all images in the same data set's train and dev.
        labelled: COMPARED of the images that the stage is fitted on.
        trainings: COMPARED of the training images of the backbone and of each ancestor.
    """
    in_training, in_labelled = _is_in_any(test, trainings), _is_in_any(test, [labelled])
    in_own_train = _is_in_any(test, [not_test])
    seen = in_training & ~in_own_train
    equal = in_training | in_labelled
    training_hashes = [table["phash"].to_numpy() for table in (*trainings, labelled)]
    near = _are_near(test["phash"].to_numpy(), np.concatenate(training_hashes)) & ~equal
    labels_seen = _is_in_any(labelled, trainings)
    return Overlap(seen, int((equal & in_own_train).sum()), int(near.sum()), int(labels_seen.sum()))


def _copies_seen(context: Context[AnyStage], dataset: Dataset, trainings: Sequence[pa.Table]) -> NDArray[np.bool_]:
    """Return whether a training used a copy of each test image [n] before ingest left the copy out of train.

    Args:
        trainings: COMPARED of the training images of the backbone and of each ancestor.
    """
    test, store, (data,) = dataset.index("test"), context.open_store(), context.inputs["data"]
    path = local_file(store, data, "duplicates.parquet") if trainings else None
    if path is None:
        return np.zeros(len(test), bool)
    copies = pq.read_table(path, columns=["key", "twin", "twin_split", "twin_dataset", "done"])
    is_pushed = pc.and_(pc.equal(copies["done"], "left out"), pc.equal(copies["twin_split"], "test"))
    copies = copies.filter(pc.and_(is_pushed, pc.equal(copies["twin_dataset"], dataset.info.name)))
    names = [file.path for file in data.files if file.path.startswith("facts/")]
    if not len(copies) or not names:
        return np.zeros(len(test), bool)
    left_out = pa.concat_tables([_facts(store, data, name, copies) for name in names])
    left_out = left_out.filter(pa.array(_is_in_any(left_out, trainings)))
    twins = copies.filter(pc.is_in(copies["key"], left_out["key"].combine_chunks()))["twin"].combine_chunks()
    # a copy has one twin in duplicates.parquet, but may be near several test images
    return _are_near(test["phash"].to_numpy(), left_out["phash"].to_numpy()) | pc.is_in(test["key"], twins).to_numpy()


def _facts(store: Store, data: Manifest, name: str, copies: pa.Table) -> pa.Table:
    """Return key and COMPARED of these images of a data set, from a file of facts."""
    facts = pq.read_table(local_file(store, data, name), columns=["key", *COMPARED])
    return facts.filter(pc.is_in(facts["key"], copies["key"].combine_chunks()))


def _are_near(hashes: NDArray[np.uint64], others: NDArray[np.uint64]) -> NDArray[np.bool_]:
    """Return which hashes [n] are near one of the others; a flat image's hash is 0, and near nothing."""
    return is_near(hashes, others[others != 0], _MAX_DISTANCE) & (hashes != 0)


def _is_in_any(images: pa.Table, others: Iterable[pa.Table]) -> NDArray[np.bool_]:
    """Return whether one of the other tables has the bytes of each image [n]."""
    is_in = np.zeros(len(images), bool)
    ids = images["content_id"].combine_chunks()
    for other in others:
        other_ids = other["content_id"]
        # Build the lookup table from the few common ids, not from a million training images.
        common = other_ids.filter(pc.is_in(other_ids, ids)).combine_chunks()
        is_in |= pc.is_in(ids, common).to_numpy(zero_copy_only=False)
    return is_in


# ------------------------------------------------------------------------------------------------- the lineage


def read_trainings(store: Store, models: Iterable[Manifest]) -> tuple[list[Training], list[str], frozenset[str]]:
    """Return (training images of models and their ancestors, models with unknown ones, digests of named data sets).

    The digests are named by the contracts of the models and of ancestors with unknown images.

    Raises:
        UserError: an index is damaged.
        StoreError: the store cannot be read.
    """
    trainings: list[Training] = []
    unknown, queue = [], list(models)
    unlisted = list(queue)
    visited = {manifest.key for manifest in queue}
    while queue:
        manifest = queue.pop()
        starts = [reference for field in BACKBONE_FIELDS for reference in manifest.inputs.get(field, ())]
        ancestors = []
        for reference in starts:
            if (backbone := _unchanged(store, reference)) is None:
                unknown.append(f"{reference.job} {reference.key[:12]}, which was removed")
            else:
                ancestors.append(backbone)
        if direct := _direct_trainings(store, manifest):
            trainings += direct
        elif originals := _originals(store, manifest):
            ancestors += originals
        else:
            unlisted.append(manifest)
            named = _named_training(store, manifest)
            trainings += named
            unknown.append(f"ancestors of {_described(manifest)}" if named else _described(manifest))
        queue += [ancestor for ancestor in ancestors if ancestor.key not in visited]
        visited |= {ancestor.key for ancestor in ancestors}
    contracts = [contract_of(store, manifest) for manifest in unlisted]
    return trainings, unknown, frozenset(contract.training_data for contract in contracts if contract)


def _direct_trainings(store: Store, model: Manifest) -> list[Training]:
    """Return what a pretraining or fine-tuning itself was trained on; empty for other jobs, or if it is unknown."""
    if model.job not in TRAINED:
        return []
    uses_labels = model.job != "pretrain" or model.config.get("objective", "softmax") not in WITHOUT_LABELS
    data = [_unchanged(store, reference) for reference in model.inputs.get("data", ())]
    return [
        Training(
            _described(model),
            _described(dataset),
            training_images(model, index).select(COMPARED),
            uses_labels,
        )
        for dataset in data
        if dataset and (index := _index(store, dataset)) is not None
    ]


def _originals(store: Store, model: Manifest) -> list[Manifest]:
    """Return the other trained models in the store with the same weights, of which this one is a copy.

    A model that was exported and imported again has the same file of weights, with the same sha256; it may also be a
    checkpoint's file.
    """
    weights = {file.sha256 for file in model.files if file.path == WEIGHTS_FILE}
    return [
        other
        for job in TRAINED
        for other in all_manifests(store, job)
        if other.key != model.key
        and any(file.sha256 in weights for file in other.files if file.path.endswith(WEIGHTS_FILE))
    ]


def _named_training(store: Store, model: Manifest) -> list[Training]:
    """Return train and dev of the data sets in the store with the digest that a model's contract names."""
    if (contract := contract_of(store, model)) is None:
        return []
    trainings = []
    for dataset in all_manifests(store, "ingest"):
        if dataset.content_digest == contract.training_data and (index := _index(store, dataset)) is not None:
            learned = index.filter(pc.not_equal(index["split"], "test")).select(COMPARED)
            trainings.append(Training(_described(model), _described(dataset), learned))
    return trainings


def training_images(model: Manifest, index: pa.Table) -> pa.Table:
    """Return the rows of a data set's index (with `split` and `label`) that a pretraining or fine-tuning used."""
    train = index.filter(pc.equal(index["split"], "train"))
    if model.job not in FINE_TUNED:
        return train
    labels, dev = Labels.model_validate(model.config["labels"]), index.filter(pc.equal(index["split"], "dev"))
    rows = support_rows(train["label"].to_numpy(), len(dev), labels, draw=0)
    return pa.concat_tables([train, dev]).take(rows)


def _unchanged(store: Store, reference: InputRef) -> Manifest | None:
    """Return the artifact that a stage used, or its replacement by `--force` with the same content.

    None if it was removed or rebuilt with other content.
    """
    current = read_current(store, reference.job, reference.key)
    for manifest in (current and current[0], read_manifest(store, reference.job, reference.key)):
        if manifest and manifest.content_digest == reference.content_digest:
            return manifest
    return None


def _index(store: Store, dataset: Manifest) -> pa.Table | None:
    """Return the columns `_READ` of a data set's index; None if it was removed or does not have all of them."""
    if _INDEX not in store.names(dataset.folder) or (path := local_file(store, dataset, _INDEX)) is None:
        return None
    try:
        with pq.ParquetFile(path) as file:
            if not set(_READ) <= set(file.schema_arrow.names):
                return None
            index = file.read(_READ)
            return index.cast(large(index.schema))
    except (OSError, pa.ArrowException) as error:
        raise UserError(f"{path} is damaged: {error}") from error


def _described(manifest: Manifest) -> str:
    return f"{manifest.stage} ({manifest.job} {manifest.key[:12]})"
