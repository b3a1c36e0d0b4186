"""Archives of VTAB's natural data sets, small, as their authors make them, and what is in them."""

import io

import numpy as np
from PIL import Image

from tests.support import cifar
from tests.support.archives import tar, zipped
from tests.support.arrays import mat


def encoded(seed, kind="JPEG", size=(24, 20), mode="RGB"):
    """An image file; smooth, so that what a JPEG loses of it is little."""
    corners = np.random.default_rng(seed).integers(0, 256, (2, 2, len(mode)), np.uint8)
    image = Image.fromarray(corners.squeeze(), mode="RGBA" if mode == "RGBA" else None).resize(size, 2)
    file = io.BytesIO()
    image.save(file, kind)
    return file.getvalue()


def tarred(files, gz=True):
    return tar(files, "w:gz" if gz else "w")


def matlab(**variables):
    return mat(variables, compress=True)


CALTECH = {"yin_yang": 31, "accordion": 33, "BACKGROUND_Google": 41, "Faces": 35}  # the archive's order


def caltech_files():
    files = {
        f"101_ObjectCategories/{folder}/image_{number:04d}.jpg": encoded([len(folder), number])
        for folder, size in CALTECH.items()
        for number in range(size, 0, -1)
    }
    return {"101_ObjectCategories/BACKGROUND_Google/tmp": b"no image"} | files


def caltech_zip():
    return zipped(
        {
            "caltech-101/101_ObjectCategories.tar.gz": tarred(caltech_files()),
            "__MACOSX/caltech-101/._101_ObjectCategories.tar.gz": b"\0\5\26\7",
            "caltech-101/Annotations.tar": tarred({"Annotations/a.mat": b""}, gz=False),
            "caltech-101/show_annotation.m": b"%",
        }
    )


def svhn():
    """Arrays [n, 32, 32, 3] and labels, 1 to 10, of both files, and the files."""
    random = np.random.default_rng(7)
    sizes = {"train": 30, "test": 11}
    arrays = {name: random.integers(0, 256, (size, 32, 32, 3), np.uint8) for name, size in sizes.items()}
    labels = {name: np.arange(size) % 10 + 1 for name, size in sizes.items()}
    files = {
        f"{name}_32x32.mat": matlab(X=array.transpose(1, 2, 3, 0), y=labels[name][:, None].astype(np.uint8))
        for name, array in arrays.items()
    }
    return arrays, labels, files


def dtd():
    """The images of 3 classes by their names, and the files of the archive; partition 1 has every third in train."""
    keys = [f"{name}/{name}_{n:04d}.jpg" for name in ("banded", "polka-dotted", "porous") for n in range(1, 13)]
    files = {f"dtd/images/{key}": encoded(number) for number, key in enumerate(keys)}
    for number, first in ((1, 0), (2, 1)):
        for split, at in (("train", 0), ("val", 1), ("test", 2)):
            lines = "".join(f"{key}\n" for key in keys[(first + at) % 3 :: 3])
            files[f"dtd/labels/{split}{number}.txt"] = lines.encode()
    return keys, files | {"dtd/imdb/imdb.mat": b""}


def flowers():
    """Images 1 to 30, of which setid.mat has 1 to 10 in the validation split, the odd ones of the others in train."""
    splits = {"valid": range(1, 11), "trnid": range(11, 31, 2), "tstid": range(12, 31, 2)}
    labels = np.arange(30) * 7 % 102 + 1
    return labels, {
        "102flowers.tgz": tarred({f"jpg/image_{n:05d}.jpg": encoded(n) for n in range(1, 31)}),
        "imagelabels.mat": matlab(labels=labels[None].astype(np.uint8)),
        "setid.mat": matlab(**{name: np.array([ids], np.uint16) for name, ids in splits.items()}),
    }


PETS = ("Abyssinian", "american_bulldog", "beagle", "Bengal")  # class 1 to 4: not the order of ASCII
ODD = {"Abyssinian_5": ("PNG", "RGBA"), "Abyssinian_34": ("GIF", "RGB")}


def trimap(picture):
    """A trimap of a picture's size: 2 (background), in it a square of 1 (pet) with a border of 3."""
    width, height = Image.open(io.BytesIO(picture)).size
    values = np.full((height, width), 2, np.uint8)
    values[height // 4 : -(height // 4), width // 4 : -(width // 4)] = 3
    values[height // 4 + 2 : -(height // 4) - 2, width // 4 + 2 : -(width // 4) - 2] = 1
    file = io.BytesIO()
    Image.fromarray(values).save(file, "PNG")
    return file.getvalue()


def pets():
    names = [f"{name}_{number}" for name in PETS for number in (5, 34, 100, 101, 102, 103)]
    pictures = {}
    for number, name in enumerate(names):
        kind, mode = ODD.get(name, ("JPEG", "RGB"))
        pictures[name] = encoded(number, kind, mode=mode)
    lines = [f"{name} {PETS.index(name.rpartition('_')[0]) + 1} 1 1" for name in names]
    annotations = {
        "annotations/list.txt": "\n".join(["#Image CLASS-ID SPECIES BREED ID", *lines]).encode(),
        "annotations/trainval.txt": "".join(f"{line}\n" for line in lines if line.split()[0][-1] in "51").encode(),
        "annotations/test.txt": "".join(f"{line}\n" for line in lines if line.split()[0][-1] not in "51").encode(),
        "annotations/trimaps/._Abyssinian_5.png": b"\0\5\26\7",
    }
    annotations |= {f"annotations/trimaps/{name}.png": trimap(data) for name, data in pictures.items()}
    archive = {f"images/{name}.jpg": data for name, data in pictures.items()} | {"images/Abyssinian_100.mat": b""}
    return pictures, {"images.tar.gz": tarred(archive, gz=False), "annotations.tar.gz": tarred(annotations)}


SUN = {
    "/a/abbey/sun_aaaaaaaaaaaaaaaa.jpg": encoded(1, size=(600, 300)),
    "/a/abbey/sun_aaaaaaaaaaaaaaab.jpg": encoded(2, "PNG", mode="L"),
    "/a/abbey/sun_aaaaaaaaaaaaaaac.jpg": encoded(3, "GIF"),
    "/c/car_interior/backseat/sun_aaaaaaaaaaaaaaad.jpg": encoded(4, "BMP"),
    "/c/car_interior/backseat/sun_aaaaaaaaaaaaaaae.jpg": encoded(5, "PNG", mode="RGBA"),
    "/c/car_interior/backseat/sun_aaaaaaaaaaaaaaaf.jpg": encoded(6, size=(400, 300)),
    "/t/track/outdoor/sun_aaaaaaaaaaaaaaag.jpg": encoded(7),
    "/t/track/outdoor/sun_aophkoiosslinihb.jpg": b"no image",
}
SUN_LISTS = {"tr": [*range(0, 8, 3), 7], "va": range(1, 7, 3), "te": range(2, 7, 3)}


def sun_lists():
    keys = list(SUN)
    return {
        f"sun397_tfds_{part}.txt": "".join(f"{keys[number]}\n" for number in numbers).encode()
        for part, numbers in SUN_LISTS.items()
    }


def sun_tar():
    stray = {
        "SUN397/ClassName.txt": b"/a/abbey\n",
        "SUN397/c/church/outdoor/sun_bhenjvsvrtumjuri.jpg": b"bad",
    }
    return tarred({f"SUN397{key}": data for key, data in SUN.items()} | stray)


def natural(task):
    """The files of a task by their names, as they lie in a root."""
    makers = {
        "caltech101": lambda: {"caltech-101.zip": caltech_zip()},
        "cifar": lambda: {"cifar-100-python.tar.gz": tarred(cifar.members(100, "python"))},
        "dtd": lambda: {"dtd-r1.0.1.tar.gz": tarred(dtd()[1])},
        "oxford_flowers102": lambda: flowers()[1],
        "oxford_iiit_pet": lambda: pets()[1],
        "svhn": lambda: svhn()[2],
        "sun397": lambda: sun_lists() | {"SUN397.tar.gz": sun_tar()},
    }
    return makers[task]()
