"""Sources made of archives of image files, as their authors ship them: ImageNet-1k, ImageNet-21k, WebDataset."""

from __future__ import annotations

import re
from pathlib import PurePosixPath
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from pipelines.file_names import parts_of
from pipelines.spec.fields import RecipeError, Root, distinct
from pipelines.spec.files import At, Files, FileSource, Named
from vit_model.fields import execution, later

IMAGENET_TRAIN = "ILSVRC2012_img_train.tar"
IMAGENET_VAL = "ILSVRC2012_img_val.tar"
IMAGENET_DEVKIT = "ILSVRC2012_devkit_t12.tar.gz"
IMAGENET_REAL = "real.json"
_IMAGENET = (IMAGENET_TRAIN, IMAGENET_VAL, IMAGENET_DEVKIT)
_SYNSET_TAR = re.compile(r"n\d{8}\.tar")
_TAR_ENDINGS = (".tar", ".tar.gz", ".tgz")


class ImageNetSource(FileSource):
    """ImageNet-1k (ILSVRC2012): the authors' two tars and devkit; their validation images are test.

    If real.json is beside them, the ReaL labels are stored beside the original labels of test.
    """

    kind: Literal["imagenet"]
    name: str = Field("ImageNet-1k", description="the name of the data set in reports")
    root: Root = execution(description="the folder, or s3://bucket/prefix, of the three files")
    dev_fraction: float = Field(
        0.01,
        gt=0,
        lt=0.5,
        description="the fraction of train that becomes dev, drawn by a hash of each image's name",
    )

    def where(self) -> Named:
        return Named(self.root, (*_IMAGENET, IMAGENET_REAL))

    def choose(self, there: Files) -> Files:
        """Return the three files, and real.json if it exists."""
        if missing := [name for name in _IMAGENET if name not in there]:
            raise RecipeError(f"source.root: {self.root} does not contain {missing[0]}; download it from image-net.org")
        return there


class ImageNet21kSource(FileSource):
    """ImageNet-21k: a tar for each synset, in one tar (fall11_whole.tar, winter21_whole.tar.gz) or in a folder."""

    kind: Literal["imagenet21k"]
    name: str = Field("ImageNet-21k", description="the name of the data set in reports")
    root: Root = execution(description="the tar, or the folder or s3://bucket/prefix of the synsets' tars")
    held_out: float = Field(
        0.004,
        gt=0,
        lt=0.25,
        description="the fraction for dev, and the same for test, drawn by a hash of each image's name",
    )
    min_images: int = Field(10, ge=1, description="synsets with fewer images are left out")

    def where(self) -> At:
        return At(self.root)

    def choose(self, there: Files) -> Files:
        """Return the single tar, or all synsets' tars."""
        tars = {name: place for name, place in there.items() if _SYNSET_TAR.fullmatch(PurePosixPath(name).name)}
        if not tars and list(there) != parts_of(next(iter(there), ""), there):
            raise RecipeError(f"source.root: {self.root} does not contain the tar of a synset, such as n01440764.tar")
        return tars or there


class WebDatasetSource(FileSource):
    """Tars of samples (WebDataset): members with the same name before the first dot are an image and its label.

    Splits come from the names of shards or folders (train, val, test); without such names they are drawn.
    """

    kind: Literal["webdataset"]
    name: str = Field("images", description="the name of the data set in reports")
    root: Root = execution(description="the folder of the tars, one tar, or s3://bucket/prefix")
    image: str | None = Field(
        None, description="the field of the image, such as jpg; null: the field with an image extension"
    )
    label: str = Field("cls", description="the field of the label: cls, or KEY of a JSON field as json.KEY")
    group: str | None = later(
        None,
        description="a field such as a patient or a site, written as label is; images with the same value stay in one"
        " split",
    )
    class_names: Annotated[tuple[str, ...], AfterValidator(distinct)] | None = Field(
        None,
        min_length=2,
        description="the names of labels 0, 1, ...; null: the labels themselves are the names",
    )
    salt: str = Field("vitflow", description="the salt of the hash that splits images without a split of their own")

    def where(self) -> At:
        return At(self.root)

    def choose(self, there: Files) -> Files:
        """Return every tar."""
        tars = {name: place for name, place in there.items() if name.lower().endswith(_TAR_ENDINGS)}
        if not tars:
            raise RecipeError(f"source.root: {self.root} contains no file that ends in {', '.join(_TAR_ENDINGS)}")
        return tars
