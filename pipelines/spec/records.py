"""Sources made of records and arrays: Parquet of Hugging Face, prepared TFDS, CIFAR; and drawn shapes."""

from __future__ import annotations

import fnmatch
from typing import Literal, Self

from pydantic import Field, model_validator

from pipelines.spec.fields import RecipeError, Root, Seed
from pipelines.spec.files import Below, Files, FileSource, InPackage
from vit_model.fields import execution, later


class HfParquetSource(FileSource):
    """Images in Parquet as Hugging Face's datasets are shipped: train-00000-of-00005.parquet, ..."""

    kind: Literal["hf_parquet"]
    name: str = Field("images", description="the name of the data set in reports")
    root: Root = execution(description="the folder, or s3://bucket/prefix, of one configuration's files")
    image: str | None = Field(None, description="the image column; null: the only column of image type")
    label: str | None = Field(
        None, description="the label column; null: the only ClassLabel, otherwise the column named label"
    )
    group: str | None = later(
        None, description="a column such as patient or site; images with the same value stay in one split"
    )
    salt: str = Field("vitflow", description="the salt of the hash that draws splits missing from the files")

    def where(self) -> Below:
        return Below(self.root)

    def choose(self, there: Files) -> Files:
        """Return every Parquet file."""
        found = {name: place for name, place in there.items() if name.endswith(".parquet")}
        if not found:
            raise RecipeError(f"source.root: {self.root} does not contain a .parquet file")
        return found


class TfdsSource(FileSource):
    """A prepared data set of TensorFlow Datasets, in tfrecord or array_record files."""

    kind: Literal["tfds"]
    name: str = Field("images", description="the name of the data set in reports")
    root: Root = execution(description="the folder, or s3://bucket/prefix, of one version, with dataset_info.json")
    image: str | None = Field(None, description="the image feature; null: the only Image")
    label: str | None = Field(
        None, description="the label feature; null: the only ClassLabel, otherwise the feature named label"
    )
    group: str | None = later(
        None, description="a feature such as patient or site; images with the same value stay in one split"
    )
    salt: str = Field("vitflow", description="the salt of the hash that draws splits missing from TFDS")

    def where(self) -> Below:
        return Below(self.root)

    def choose(self, there: Files) -> Files:
        """Return every file of the data set, which has no folders."""
        for name in ("dataset_info.json", "features.json"):
            if name not in there:
                raise RecipeError(
                    f"source.root: {self.root} does not contain {name}; use the folder of one version, or prepare it"
                )
        return {name: place for name, place in there.items() if "/" not in name}


CIFAR_FILES = {
    (10, "binary"): (
        "cifar-10-batches-bin",
        ("batches.meta.txt", *(f"data_batch_{number}.bin" for number in range(1, 6)), "test_batch.bin"),
    ),
    (10, "python"): (
        "cifar-10-batches-py",
        ("batches.meta", *(f"data_batch_{number}" for number in range(1, 6)), "test_batch"),
    ),
    (100, "binary"): ("cifar-100-binary", ("fine_label_names.txt", "train.bin", "test.bin")),
    (100, "python"): ("cifar-100-python", ("meta", "train", "test")),
}
"""(classes, version) -> the folder in the archive, and its files: names, train's in order, test's."""


class CifarSource(FileSource):
    """CIFAR-10 or CIFAR-100 (fine labels), python or binary version; its test is test, a part of train is dev."""

    kind: Literal["cifar"]
    classes: Literal[10, 100] = Field(10, description="CIFAR-10 or CIFAR-100")
    root: Root = execution(
        description="the folder, or s3://bucket/prefix, of cifar-10-python.tar.gz (or -binary, or cifar-100-...)"
        " or of its content"
    )
    dev_fraction: float = later(
        1 / 12,
        gt=0,
        lt=0.5,
        description="the fraction of train that becomes dev, drawn by a hash of the pixels",
    )

    @property
    def name(self) -> str:
        """The name of the data set in reports."""
        return f"CIFAR-{self.classes}"

    def where(self) -> Below:
        return Below(self.root)

    def choose(self, there: Files) -> Files:
        """Return the archive, or the files from it by their base names."""
        for version in ("binary", "python"):
            pattern = f"cifar-{self.classes}-{version}.tar*"
            if archives := sorted(fnmatch.filter(there, pattern)):
                return {archives[0]: there[archives[0]]}
            folder, names = CIFAR_FILES[self.classes, version]
            for before in (f"{folder}/", ""):
                if all(before + name in there for name in names):
                    return {name: there[before + name] for name in names}
        raise RecipeError(
            f"source.root: {self.root} contains neither cifar-{self.classes}-python.tar.gz nor"
            f" cifar-{self.classes}-binary.tar.gz, nor all files of one of them"
        )


SHAPES = ("arrow", "drop", "flag", "heart", "hook", "moon", "sail", "tee")  # all without rotational symmetry
COLOURS = ("red", "yellow", "green", "cyan", "blue", "magenta")
FACTORS: dict[str, tuple[str, ...]] = {
    "shape": SHAPES,
    "colour": COLOURS,
    "orientation": tuple(f"{degrees} degrees" for degrees in range(0, 360, 45)),
    "scale": tuple(f"scale {number}" for number in range(1, 7)),
    "position": tuple(f"row {row + 1}, column {column + 1}" for row in range(3) for column in range(3)),
    "count": tuple(map(str, range(1, 10))),
}
"""The values of each factor of variation; a recipe chooses one factor as the label."""


class ShapesSource(FileSource):
    """Drawn figures with factors of variation: shape, colour, orientation, scale, position, count."""

    kind: Literal["shapes"]
    name: str = Field("Shapes", description="the name of the data set in reports")
    label: Literal["shape", "colour", "orientation", "scale", "position", "count"] = Field(
        "shape", description="the factor to classify; the images depend on the seed alone, not on the factor"
    )
    images: int = Field(50_000, ge=1, description="number of training images")
    dev_images: int = Field(2_000, ge=0)
    test_images: int = Field(5_000, ge=0)
    resolution: int = Field(64, ge=32, le=512, description="side of the images in pixels")
    max_count: int = Field(1, ge=1, le=9, description="most figures per image, equal except for their positions")
    seed: Seed = 0
    masks: bool = later(
        False, description="also draw each image's mask, for the stage segment: the background and the shapes"
    )

    @model_validator(mode="after")
    def _label_is_unique(self) -> Self:
        if self.label == "position" and self.max_count > 1:
            raise ValueError(
                f"max_count: {self.max_count} figures have several positions; label position needs max_count 1"
            )
        if self.label == "count" and self.max_count == 1:
            raise ValueError("max_count: label count needs max_count 2 or more")
        return self

    @property
    def has_masks(self) -> bool:
        return self.masks

    def where(self) -> InPackage:
        """Return the module that draws the images, and with masks the one that draws these: no other file matters."""
        return InPackage("ray_jobs", "sources/readers", "shape*.py" if self.masks else "shapes.py")
