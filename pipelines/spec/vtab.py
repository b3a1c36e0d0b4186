"""The 19 tasks of VTAB-1k, their archives, and the source for a recipe.

The tables list the files that a task needs, as its authors ship them, accepted alternatives, and their origin.
`ray_jobs.sources.vtab` reads them and assigns the splits.
"""

from __future__ import annotations

import fnmatch
from typing import Annotated, Literal, NamedTuple, Self

from pydantic import AfterValidator, Field, model_validator

from pipelines.spec.fields import RecipeError, located
from pipelines.spec.files import Below, Files, FileSource
from vit_model.fields import execution, later

Task = Literal[
    "caltech101",
    "cifar",
    "dtd",
    "oxford_flowers102",
    "oxford_iiit_pet",
    "svhn",
    "sun397",
    "patch_camelyon",
    "eurosat",
    "resisc45",
    "diabetic_retinopathy",
    "clevr_count",
    "clevr_dist",
    "dmlab",
    "kitti",
    "dsprites_loc",
    "dsprites_ori",
    "smallnorb_azi",
    "smallnorb_ele",
]
Group = Literal["natural", "specialized", "structured"]


class Need(NamedTuple):
    """A file that a task needs. `name` is its name in the code, even if an accepted alternative is used."""

    name: str
    origin: str
    """The place to get it from, for a message."""
    accepted: tuple[str, ...] = ()
    """Other names, or patterns, of files with the same content; their magic bytes tell the compression."""
    parts: int = 0
    """The number of pieces, name.001, name.002, ..., that are accepted instead of the whole file."""


class TaskFiles(NamedTuple):
    """A task's name in reports, its group, the folder of its archives below the root, and the archives."""

    title: str
    group: Group
    folder: str
    needs: tuple[Need, ...]


_WHEEL = "`pip download --no-deps tensorflow-datasets==4.9.10`: the wheel, or its three lists"
_SVHN = "ufldl.stanford.edu/housenumbers"
_PCAM = "zenodo.org/records/2546921"
_KAGGLE = "kaggle.com/c/diabetic-retinopathy-detection/data"
_KITTI = "s3.eu-central-1.amazonaws.com/avg-kitti"
_NORB = "cs.nyu.edu/~ylclab/data/norb-v1.0-small"
_NORB_FILES = ("5x46789x9x18x6x2x96x96-training", "5x01235x9x18x6x2x96x96-testing")

_CLEVR = (Need("CLEVR_v1.0.zip", "dl.fbaipublicfiles.com/clevr"),)
_DSPRITES = (
    Need(
        "dsprites_ndarray_co1sh3sc6or40x32y32_64x64.hdf5",
        "github.com/deepmind/dsprites-dataset",
        ("dsprites_ndarray_co1sh3sc6or40x32y32_64x64.npz",),
    ),
)
_SMALLNORB = tuple(
    Need(f"smallnorb-{file}-{part}.mat.gz", _NORB, (f"smallnorb-{file}-{part}.mat",))
    for file in _NORB_FILES
    for part in ("dat", "cat", "info")
)

TASKS: dict[Task, TaskFiles] = {
    "caltech101": TaskFiles("Caltech101", "natural", "caltech101", (
        Need("caltech-101.zip", "data.caltech.edu/records/mzrjq-6wc02",
             ("101_ObjectCategories.tar.gz", "101_ObjectCategories.tar")),)),
    "cifar": TaskFiles("CIFAR-100", "natural", "cifar100", (
        Need("cifar-100-python.tar.gz", "cs.toronto.edu/~kriz/cifar.html",
             ("cifar-100-binary.tar.gz", "cifar-100-python.tar", "cifar-100-binary.tar")),)),
    "dtd": TaskFiles("DTD", "natural", "dtd", (
        Need("dtd-r1.0.1.tar.gz", "robots.ox.ac.uk/~vgg/data/dtd", ("dtd-r1.0.1.tar",)),)),
    "oxford_flowers102": TaskFiles("Flowers102", "natural", "oxford_flowers102", (
        Need("102flowers.tgz", "robots.ox.ac.uk/~vgg/data/flowers/102", ("102flowers.tar.gz", "102flowers.tar")),
        Need("imagelabels.mat", "robots.ox.ac.uk/~vgg/data/flowers/102"),
        Need("setid.mat", "robots.ox.ac.uk/~vgg/data/flowers/102"))),
    "oxford_iiit_pet": TaskFiles("Pets", "natural", "oxford_iiit_pet", (
        Need("images.tar.gz", "robots.ox.ac.uk/~vgg/data/pets", ("images.tar",)),
        Need("annotations.tar.gz", "robots.ox.ac.uk/~vgg/data/pets", ("annotations.tar",)))),
    "svhn": TaskFiles("SVHN", "natural", "svhn_cropped", (
        Need("train_32x32.mat", _SVHN), Need("test_32x32.mat", _SVHN))),
    "sun397": TaskFiles("SUN397", "natural", "sun397", (
        Need("SUN397.tar.gz", "vision.princeton.edu/projects/2010/SUN", ("SUN397.tar",)),
        *(Need(f"sun397_tfds_{part}.txt", _WHEEL, ("tensorflow_datasets-*.whl",)) for part in ("tr", "va", "te")))),
    "patch_camelyon": TaskFiles("Patch Camelyon", "specialized", "patch_camelyon", tuple(
        Need(f"camelyonpatch_level_2_split_{part}_{array}.h5.gz", _PCAM,
             (f"camelyonpatch_level_2_split_{part}_{array}.h5",))
        for part in ("train", "valid", "test") for array in "xy")),
    "eurosat": TaskFiles("EuroSAT", "specialized", "eurosat", (
        Need("EuroSAT.zip", "zenodo.org/records/7711810", ("EuroSAT_RGB.zip",)),)),
    "resisc45": TaskFiles("Resisc45", "specialized", "resisc45", (
        Need("NWPU-RESISC45.rar", "the authors' OneDrive; as a zip on huggingface.co",
             ("NWPU-RESISC45.zip",)),)),
    "diabetic_retinopathy": TaskFiles("Diabetic Retinopathy", "specialized", "diabetic_retinopathy_detection", (
        Need("train.zip", _KAGGLE, parts=5), Need("test.zip", _KAGGLE, parts=7),
        Need("trainLabels.csv.zip", _KAGGLE, ("trainLabels.csv",)),
        Need("retinopathy_solution.csv", "storage.googleapis.com/kaggle-forum-message-attachments/90528/2877"))),
    "clevr_count": TaskFiles("Clevr-Count", "structured", "clevr", _CLEVR),
    "clevr_dist": TaskFiles("Clevr-Distance", "structured", "clevr", _CLEVR),
    "dmlab": TaskFiles("DMLab", "structured", "dmlab", (
        Need("dmlab.tar.gz", "storage.googleapis.com/dmlab-vtab", ("dmlab.tar",)),)),
    "kitti": TaskFiles("KITTI-Distance", "structured", "kitti", tuple(
        Need(name, _KITTI) for name in ("data_object_image_2.zip", "data_object_label_2.zip", "devkit_object.zip"))),
    "dsprites_loc": TaskFiles("dSprites-Location", "structured", "dsprites", _DSPRITES),
    "dsprites_ori": TaskFiles("dSprites-Orientation", "structured", "dsprites", _DSPRITES),
    "smallnorb_azi": TaskFiles("sNORB-Azimuth", "structured", "smallnorb", _SMALLNORB),
    "smallnorb_ele": TaskFiles("sNORB-Elevation", "structured", "smallnorb", _SMALLNORB),
}  # fmt: skip
WHOLE = ", whole"  # added to a title for all images of the data set
GROUPS: dict[Task, Group] = {task: files.group for task, files in TASKS.items()}


class VtabSource(FileSource):
    """One of VTAB-1k's 19 tasks, from its authors' archives, in the splits that TFDS and VTAB give it."""

    kind: Literal["vtab"]
    task: Task
    root: Annotated[str, AfterValidator(located)] = execution(
        description="the folder of the archives, or of folders of archives named after the tasks or their data sets"
    )
    membership: Annotated[str, AfterValidator(located)] | None = execution(
        None,
        description="caltech101 only: a file that lists the images of TFDS's train split, one <class>/<file> per line",
    )
    subset: Literal["vtab_1k", "whole"] = later(
        "vtab_1k",
        description="whole: all records of TFDS's train and VTAB's test; dev is the last `dev_fraction` of train in"
        " TFDS's order, and TFDS's own validation split is left out",
    )
    dev_fraction: float = later(0.1, gt=0, lt=1, description="fraction of train, with subset whole")
    pixels: Literal["published", "raw"] = Field(
        "published", description="raw: the authors' files, for tasks whose images VTAB shrank or re-encoded"
    )
    masks: bool = later(
        False,
        description="oxford_iiit_pet only: also keep the trimaps, for the stage segment: background and pet; the border"
        " between them is ignored",
    )

    @property
    def name(self) -> str:
        """The name of the data set in reports."""
        return TASKS[self.task].title + (WHOLE if self.subset == "whole" else "")

    @model_validator(mode="after")
    def _fields_fit(self) -> Self:
        if self.subset == "vtab_1k" and self.dev_fraction != 0.1:
            raise ValueError(f"dev_fraction {self.dev_fraction}: VTAB-1k's dev has 200 images; it is for subset: whole")
        if self.masks and self.task != "oxford_iiit_pet":
            raise ValueError(f"masks: only oxford_iiit_pet has them; remove it for {self.task}")
        return self

    @property
    def has_masks(self) -> bool:
        return self.masks

    def where(self) -> Below:
        return Below(self.root)

    def choose(self, there: Files) -> Files:
        """Return every file that the task needs, by its name in the table.

        The task's folder comes first, then its data set's, then the root.

        Raises:
            RecipeError: files are missing; the message names them all, and where to get them.
        """
        if self.membership and self.task != "caltech101":
            raise RecipeError(f"source.membership: only caltech101 uses it; remove it for {self.task}")
        found = {need: self._found(need, there) for need in TASKS[self.task].needs}
        if missing := [need for need, files in found.items() if not files]:
            raise RecipeError(f"source.root: {self.root}, for {self.task}, is missing{''.join(map(_named, missing))}")
        beside = {"membership": self.membership} if self.membership else {}
        return {name: place for files in (*found.values(), beside) for name, place in files.items()}

    def _found(self, need: Need, there: Files) -> Files:
        """Return the file or its pieces; empty if they are missing."""
        for folder in (f"{self.task}/", f"{TASKS[self.task].folder}/", ""):
            for pattern in (need.name, *need.accepted):
                if names := sorted(fnmatch.filter(there, folder + pattern)):
                    return {need.name: there[names[-1]]}
            pieces = [f"{need.name}.{number:03d}" for number in range(1, need.parts + 1)]
            if pieces and all(folder + piece in there for piece in pieces):
                return {piece: there[folder + piece] for piece in pieces}
        return {}


def _named(need: Need) -> str:
    pieces = (f"{need.name}.001 to .{need.parts:03d}",) if need.parts else ()
    return f"\n  {' or '.join((need.name, *need.accepted, *pieces))} ({need.origin})"
