"""A small ImageNet-1k in its authors' format, two tars and a devkit, and the synset tars of a small ImageNet-21k."""

import io
from pathlib import Path

import numpy as np
import scipy

from tests.support.archives import image, tar

# ILSVRC2012_ID is not the rank: the devkit numbers them otherwise, and synsets above the leaves follow
SYNSETS = (
    (1, "n02119789", "kit fox, Vulpes macrotis"),
    (2, "n01440764", "tench, Tinca tinca"),
    (3, "n02012849", "crane"),
    (4, "n03126707", "crane"),
)
TRUTH = (2, 2, 1, 4, 3, 1)  # IDs of val images 1, 2, ...
REAL = [[0], [], [2, 1], [3], [1], []]
"""Content of real.json: the classes of val images 1, 2, ... as relabelled by ReaL."""
WHOLE = {"n00004475": 12, "n02084071": 40, "n00005787": 3, "n12992868": 25}
"""Synsets of ImageNet-21k and how many images they have."""


def meta() -> bytes:
    """data/meta.mat: a struct array with the fields in their order."""
    fields = [("ILSVRC2012_ID", "O"), ("WNID", "O"), ("words", "O"), ("gloss", "O"), ("num_children", "O")]
    rows = [(number, wnid, words, "what it is", 0) for number, wnid, words in SYNSETS]
    rows.append((5, "n00001740", "entity", "all of it", 4))
    file = io.BytesIO()
    scipy.io.savemat(file, {"synsets": np.array(rows, fields).reshape(-1, 1)})
    return file.getvalue()


def devkit(meta_mat: bytes) -> bytes:
    folder = "ILSVRC2012_devkit_t12"
    names = {f"{folder}/": b"", f"{folder}/readme.txt": b"read me", f"{folder}/data/": b""}
    names |= {f"{folder}/data/meta.mat": meta_mat}
    truth = "".join(f"{number}\n" for number in TRUTH).encode()
    return tar(names | {f"{folder}/data/ILSVRC2012_validation_ground_truth.txt": truth}, "w:gz")


def train_tar(images: int = 30) -> bytes:
    """As theirs, a tar of tars, in an order of its own; image i of the synset with ID n is image(1000 n + i)."""
    return tar(
        {
            f"{wnid}.tar": tar({f"{wnid}_{i}.JPEG": image(number * 1000 + i) for i in range(images)})
            for number, wnid, _ in SYNSETS
        }
    )


def val_tar() -> bytes:
    """In no order; image i is image(9000 + i)."""
    order = (3, 1, 6, 2, 5, 4)
    return tar({f"ILSVRC2012_val_{number:08d}.JPEG": image(9000 + number) for number in order})


def files(images: int = 30) -> dict[str, bytes]:
    return {
        "ILSVRC2012_img_train.tar": train_tar(images),
        "ILSVRC2012_img_val.tar": val_tar(),
        "ILSVRC2012_devkit_t12.tar.gz": devkit(meta()),
    }


def write(root: Path, images: int = 30, **changes: bytes) -> Path:
    """The files in a folder; `changes` by train, val, t12."""
    root.mkdir(exist_ok=True)
    for name, data in files(images).items():
        (root / name).write_bytes(changes.get(name.split(".")[0].rpartition("_")[2], data))
    return root


def synset(wnid: str, images: int) -> bytes:
    """The tar of one synset."""
    return tar({f"{wnid}_{i}.JPEG": image(int(wnid[1:]) % 1000 + i) for i in range(images)})
