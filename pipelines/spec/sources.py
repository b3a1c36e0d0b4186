"""The sources of an ingest's images."""

from __future__ import annotations

from typing import Annotated, Literal, Self, get_args

from pydantic import AfterValidator, Field, model_validator

from pipelines.spec.archives import ImageNet21kSource, ImageNetSource, WebDatasetSource
from pipelines.spec.fields import RecipeError, Root, Seed, ascending, distinct
from pipelines.spec.files import At, Files, FileSource, InPackage, Named
from pipelines.spec.records import CifarSource, HfParquetSource, ShapesSource, TfdsSource
from pipelines.spec.vtab import VtabSource
from vit_model.fields import execution, later


class GlyphSource(FileSource):
    """Letters and symbols of all scripts, rendered from matplotlib's Unicode text fonts into 8x8 block counts."""

    kind: Literal["glyphs"]
    images: int = Field(57_000, ge=1_000, description="number of training images to render, balanced over the classes")
    dev_images: int = Field(2_000, ge=100, description="number of dev images to render, for monitoring pretraining")
    seed: Seed = 0

    def where(self) -> InPackage:
        return InPackage("matplotlib", "mpl-data/fonts/ttf", "*.ttf")


class DigitsSource(FileSource):
    """The 1,797 handwritten digits that scikit-learn ships (8x8, the test part of UCI's set, by 13 writers)."""

    kind: Literal["digits"]

    def where(self) -> InPackage:
        return InPackage("sklearn", "datasets/data", "digits.csv.gz")


BoxFormat = Literal["coco", "yolo", "voc", "kitti"]
_OF_LABELS = ("group", "image_column", "label_column", "labels", "multi_label", "label_separator")


class FolderSource(FileSource):
    """Your own images: class folders, train/val/test folders of class folders, or metadata.csv, .jsonl or .parquet."""

    kind: Literal["folder"]
    name: str = Field("images", description="the name of the data set in reports")
    root: Root = execution(
        description="the folder, a tar or zip of it, or s3://bucket/prefix; its content enters the key, "
        "its location does not"
    )
    salt: str = Field("vitflow", description="the salt of the hash that splits images without a split of their own")
    group: str | None = later(
        None,
        description="column of the metadata table; images with the same value (a patient, a site) stay in one split",
    )
    image_column: str = later(
        "file_name", description="the column with the image paths of metadata.csv, .jsonl or .parquet"
    )
    label_column: str = later("label", description="the column of these tables with the labels")
    labels: bool = later(
        True,
        description="false: images in any folders, without labels, for objectives that use none, embed and predict; all"
        " are in train, unless split folders or the tables say otherwise",
    )

    multi_label: bool = later(
        False,
        description="an image can have several labels, or none: lists in the tables' label column, or text with"
        " label_separator between the labels",
    )
    label_separator: str | None = later(
        None,
        min_length=1,
        description="with multi_label: what separates the labels in a cell of text, such as ; or |; null: cells are"
        ' lists, in CSV as JSON (["cat", "dog"])',
    )

    boxes: BoxFormat | None = later(
        None,
        description="the images have boxes of objects, for detect, in this form: COCO's JSON, or a file per image of"
        " YOLO, Pascal VOC or KITTI; an image's labels are the classes of its boxes",
    )

    mask_classes: Annotated[tuple[str, ...], AfterValidator(distinct)] | None = later(
        None,
        min_length=2,
        max_length=255,
        description="the images have masks, for segment: PNGs in a folder beside theirs (images/1.jpg, masks/1.png)."
        " These are the names of their values 0, 1, ...; 255 is ignored. The images have no labels",
    )

    masks: Literal["coco"] | None = later(
        None,
        description="with mask_classes; coco: draw the masks from the polygons in COCO's JSON instead of reading PNGs."
        " Pixels outside all objects have the first class if it is not a category; otherwise they are ignored",
    )

    @model_validator(mode="after")
    def _boxes_fit(self) -> Self:
        for field, what in (
            ("boxes", f"boxes {self.boxes}: the boxes have the labels"),
            ("mask_classes", "mask_classes: images with masks have no labels"),
        ):
            others = (*_OF_LABELS, "mask_classes" if field == "boxes" else "boxes")
            changed = [name for name in others if getattr(self, name) != type(self).model_fields[name].default]
            if getattr(self, field) is not None and changed:
                raise ValueError(f"{what}; leave out {', '.join(changed)}")
        if self.masks is not None and self.mask_classes is None:
            raise ValueError(f"masks {self.masks} needs mask_classes, the names of the classes")
        return self

    @model_validator(mode="after")
    def _column_has_labels(self) -> Self:
        if not self.labels and self.label_column != "label":
            raise ValueError(f"label_column {self.label_column}: no labels are read with labels: false")
        if not self.labels and self.multi_label:
            raise ValueError("multi_label: no labels are read with labels: false")
        if self.label_separator is not None and not self.multi_label:
            raise ValueError(f"label_separator {self.label_separator!r} needs multi_label: true")
        return self

    @property
    def has_boxes(self) -> bool:
        return self.boxes is not None

    @property
    def has_masks(self) -> bool:
        return self.mask_classes is not None

    @property
    def has_labels(self) -> bool:
        return self.labels and not self.has_masks

    @property
    def has_several_labels(self) -> bool:
        return self.multi_label or self.has_boxes

    def where(self) -> At:
        return At(self.root)


FASHION_MNIST_ROOT = "/usr/share/datasets/fashion-mnist"
FASHION_MNIST_NAME = "Fashion-MNIST"
FASHION_MNIST = (
    *("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat"),
    *("Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
)


_IDX = {  # the authors' file names -> the names that copies use; Kaggle's MNIST has a dot
    f"{name}-ubyte": tuple(
        f"{form}-ubyte{ending}" for form in (name, name.replace("-idx", ".idx")) for ending in (".gz", "")
    )
    for name in ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1")
}


class IdxSource(FileSource):
    """Fashion-MNIST, MNIST and others in their authors' four IDX files; their test is test, 1/12 of train is dev."""

    kind: Literal["idx"]
    name: str = Field(FASHION_MNIST_NAME, description="the name of the data set in reports")
    root: Root = execution(
        FASHION_MNIST_ROOT, description="the folder, or s3://bucket/prefix, of the four files, gzipped or not"
    )
    class_names: Annotated[tuple[str, ...], AfterValidator(distinct)] = Field(
        FASHION_MNIST, min_length=2, max_length=256, description="the names of labels 0, 1, ... in the files"
    )
    classes: Annotated[tuple[int, ...], AfterValidator(distinct), AfterValidator(ascending)] | None = Field(
        None, min_length=2, description="the labels to keep, renumbered 0, 1, ... in this order; null: all"
    )

    @model_validator(mode="after")
    def _classes_have_names(self) -> Self:
        for label in self.classes or ():
            if not 0 <= label < len(self.class_names):
                raise ValueError(f"classes: {label} is not from 0 to {len(self.class_names) - 1}")
        if not self.name.startswith(FASHION_MNIST_NAME) and "class_names" not in self.model_fields_set:
            raise ValueError(f"class_names: name the classes of {self.name}; the default names are Fashion-MNIST's")
        return self

    def selected(self) -> tuple[int, ...]:
        """Return the labels to keep, ascending."""
        return self.classes or tuple(range(len(self.class_names)))

    def where(self) -> Named:
        return Named(self.root, tuple(form for forms in _IDX.values() for form in forms))

    def choose(self, there: Files) -> Files:
        """Return the four files, by their authors' names without .gz."""
        found = {}
        for name, forms in _IDX.items():
            present = [form for form in forms if form in there]
            if not present:
                raise RecipeError(
                    f"source.root: {self.root} does not contain {name}, gzipped or not; expected {', '.join(_IDX)}. "
                    "If this is Fashion-MNIST, apt-get install dataset-fashion-mnist puts them into "
                    f"{FASHION_MNIST_ROOT}"
                )
            found[name] = there[present[0]]
        return found


class ScenesSource(FileSource):
    """Images of several objects with their boxes: drawn shapes, or digits or Fashion-MNIST on coloured canvases."""

    kind: Literal["scenes"]
    name: str = Field("Scenes", description="the name of the data set in reports")
    figures: Literal["shapes", "digits", "fashion_mnist"] = Field(
        "digits",
        description="the objects; a digit or a piece of clothing appears only in the split that its own set gives it",
    )
    images: int = Field(3_000, ge=1, description="number of training images")
    dev_images: int = Field(500, ge=0)
    test_images: int = Field(1_000, ge=0)
    resolution: int = Field(64, ge=32, le=512, description="side of the images in pixels")
    max_count: int = Field(5, ge=1, le=20, description="most objects per image; a few images have none")
    seed: Seed = 0

    @property
    def has_boxes(self) -> bool:
        return True

    def where(self) -> Named | InPackage:
        match self.figures:
            case "digits":
                return DigitsSource(kind="digits").where()
            case "fashion_mnist":
                return IdxSource(kind="idx").where()
        return InPackage("ray_jobs", "sources/readers", "s[ch]*es.py")  # scenes and shapes: no other file matters

    def choose(self, there: Files) -> Files:
        return IdxSource(kind="idx").choose(there) if self.figures == "fashion_mnist" else there


AnySource = (
    GlyphSource
    | DigitsSource
    | FolderSource
    | IdxSource
    | ImageNetSource
    | ImageNet21kSource
    | WebDatasetSource
    | VtabSource
    | HfParquetSource
    | TfdsSource
    | CifarSource
    | ShapesSource
    | ScenesSource
)
Source = Annotated[AnySource, Field(discriminator="kind")]
SOURCE_TYPES: dict[str, type[FileSource]] = {
    get_args(source.model_fields["kind"].annotation)[0]: source for source in get_args(AnySource)
}
