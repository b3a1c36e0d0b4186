"""A store in a notebook: `pipelines.open_store(uri)`.

In: a store. Out: models that classify, datasets with their images, and all measurements as a table. Nothing here
changes the store. KEY is a key, a unique key prefix, RUN/STAGE, RUN or @ALIAS, as on the command line.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipelines.results.lookup import find_artifact
from pipelines.results.sql.columns import TABLES
from pipelines.results.sql.tables import define_tables
from pipelines.spec import LAST, RecipeError, nearest
from pipelines.store import Manifest, Store, model_folder
from vit_model.contract import Preprocessing
from vit_model.errors import UserError

if TYPE_CHECKING:
    import duckdb
    import numpy as np
    import pyarrow as pa
    from numpy.typing import NDArray

    from ray_jobs.data.shards import Dataset, DatasetInfo, Split
    from vit_model.build import Network

SIDE = 224  # pixels per side, for images that differ in size, without a preprocessing
SAMPLE_COLUMNS = ("sample_id", "key", "width", "height", "channels", "label")


@dataclass(frozen=True)
class Library:
    """The content of a store; `pipelines.open_store` returns one."""

    store: Store

    def __repr__(self) -> str:
        return f"Library({self.store.uri!r}): .model(KEY), .dataset(KEY), .table(NAME)"

    def model(self, key: str | None = None, checkpoint: str = LAST) -> StoredModel:
        """Load a model; without a key, the newest.

        Args:
            checkpoint: of a pretraining: last, best or step:N.

        Raises:
            RecipeError: no model or several match, or the model does not have this checkpoint.
        """
        from vit_model.weights import load_model

        manifest = find_artifact(self.store, key, "model")
        folder = model_folder(self.store, manifest, checkpoint)
        model, contract = load_model(folder)
        return StoredModel(manifest, folder, model, contract.preprocessing, contract.class_names)

    def dataset(self, key: str | None = None) -> StoredDataset:
        """Open a dataset; without a key, the newest. Raises RecipeError if none or several match."""
        from ray_jobs.data.shards import open_artifact

        manifest = find_artifact(self.store, key, "dataset")
        return StoredDataset(manifest, open_artifact(self.store, manifest))

    def table(self, name: str) -> duckdb.DuckDBPyRelation:
        """Return a table of `vitflow report query --tables`, such as accuracies or training_log, as a DuckDB relation.

        Use `.filter(...)`, `.aggregate(...)`, `.df()`, `.arrow()`, or SQL with `.query("t", "select ... from t")`.

        Raises:
            RecipeError: there is no such table.
        """
        import duckdb

        if name not in TABLES:
            raise RecipeError(f"table {name!r} is unknown{nearest(name, TABLES)}")
        connection = duckdb.connect()
        define_tables(connection, self.store, {name})
        return connection.table(name)


@dataclass(frozen=True)
class StoredModel:
    """A model: `model` is a torch module on the CPU, float32, in evaluation mode; `folder` has its two files."""

    manifest: Manifest = field(repr=False)
    folder: Path = field(repr=False)
    model: Network = field(repr=False)
    preprocessing: Preprocessing
    class_names: tuple[str, ...]
    """In the order of the logits; empty for a model that returns only representations."""

    def classify(self, images: Sequence[str | Path]) -> list[dict[str, Any]]:
        """Return the five likeliest classes of each file, as [{"image": path, "top": [{"class", "probability"}, ...]}].

        Raises:
            ValueError: a file is not an image, or the model has no classes.
        """
        from vit_model.predict import classify

        return classify(self.folder, [Path(image) for image in images])


@dataclass(frozen=True)
class StoredDataset:
    """A dataset; `info` is its dataset.json, with `class_names` in the order of the labels."""

    manifest: Manifest
    data: Dataset

    def __repr__(self) -> str:
        info = self.info
        size = info.image and f"{info.image.height} x {info.image.width} x {info.image.channels}"
        images = ", ".join(f"{count:,} {split}" for split, count in info.splits.items())
        return (
            f"StoredDataset({info.name!r}, key {self.manifest.key[:12]}: {images} images, "
            f"{len(info.class_names)} classes, {size or 'image files of any size'})"
        )

    @property
    def info(self) -> DatasetInfo:
        """The dataset's name, its classes, and the number of images in each split."""
        return self.data.info

    def samples(self, split: str = "train") -> pa.Table:
        """Return a split's images without their pixels, in the order of `images`.

        Columns: sample_id, key (the file's name), width, height, channels (as stored), label, class_name.

        Raises:
            ValueError: there is no such split, or it is empty.
        """
        import pyarrow as pa

        table = self.data.index(self._require(split)).select(SAMPLE_COLUMNS)
        names = pa.array(self.info.label_names, pa.large_string()).take(table["label"].combine_chunks())
        return table.append_column("class_name", names)

    def images(
        self,
        split: str = "train",
        rows: Sequence[int] | None = None,
        preprocessing: Preprocessing | None = None,
    ) -> NDArray[np.uint8]:
        """Return images [n, side, side, channels], uint8: these rows of a split, by default its first 16.

        With `preprocessing`, they are what a model with that preprocessing gets. Without, they are as stored if all
        are square and of one size, else a square of 224 pixels from their middle.

        Raises:
            ValueError: there is no such split or row.
        """
        name = self._require(split)
        indices = range(min(16, self.info.splits[name])) if rows is None else rows
        return self.data.images(name, preprocessing or self._plain(), list(indices))

    def _require(self, split: str) -> Split:
        from ray_jobs.data.shards import SPLITS

        for name in SPLITS:
            if split == name:
                self.data.require(name)
                return name
        raise UserError(f"{self.info.name} has no split {split!r}{nearest(split, SPLITS)}")

    def _plain(self) -> Preprocessing:
        size = self.info.image
        channels, side, crop = 3, SIDE, "center"
        if size is not None:
            channels = size.channels
            if size.height == size.width:
                side, crop = size.height, "squash"
        plain = {"mean": (0.0,) * channels, "std": (1.0,) * channels, "channels": channels}
        return Preprocessing.model_validate(plain | {"resolution": side, "crop": crop})
