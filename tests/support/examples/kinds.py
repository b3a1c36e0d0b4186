"""Examples of all kinds but `vtab`."""

import json

import numpy as np

from tests.support import cifar, idx, imagenet
from tests.support.archives import image, rar, tar, zipped
from tests.support.examples import LIBRARY, Example, written
from tests.support.prepared import FORMATS, SPLITS, put_parquet, put_tfds
from tests.support.webdataset import shard

PETS = {f"{name}/{i}.png": image(100 * len(name) + i, "PNG") for name in ("cat", "horse") for i in range(12)}
LABELS = [i % 3 for i in range(12)]
BAD = [image(50, "PNG", "L"), image(51)[:-100], None]  # but the first
INK, DIGITS = np.arange(360, dtype=np.uint8).reshape(12, 6, 5), np.arange(12, dtype=np.uint8) % 2


def parquet() -> dict[str, bytes]:
    def put(folder):
        put_parquet(folder / "train-00000-of-00001.parquet", [image(i) for i in range(12)], LABELS)
        bad = folder / "test-00000-of-00001.parquet"
        put_parquet(bad, BAD, [2, 0, 1], compression="none", plain=False)

    return written(put)


def cifar_archive(classes: int, version: str) -> dict[str, bytes]:
    return {f"cifar-{classes}-{version}.tar.gz": tar(cifar.members(classes, version), "w:gz")}


def pairs() -> dict[str, bytes]:
    return {name: idx.encoded(INK if "images" in name else DIGITS) for name in idx.NAMES}


def synsets() -> dict[str, bytes]:
    return {"whole.tar": tar({f"{wnid}.tar": imagenet.synset(wnid, n) for wnid, n in imagenet.WHOLE.items()})}


EXAMPLES = [
    Example("folder", {"kind": "folder"}, lambda: {"pets.zip": zipped(PETS)}, root="pets.zip", images=len(PETS)),
    Example("files", {"kind": "folder"}, lambda: PETS, images=len(PETS), fuzzed={"cat/1.png": 1.0}),
    Example(
        "rar",
        {"kind": "folder"},
        lambda: {"pets.rar": rar(PETS)},
        root="pets.rar",
        images=len(PETS),
        fuzzed={},
    ),
    Example(
        "imagenet",
        {"kind": "imagenet"},
        lambda: imagenet.files(images=8) | {"real.json": json.dumps(imagenet.REAL).encode()},
        images=4 * 8 + len(imagenet.TRUTH),
        fuzzed={
            "ILSVRC2012_img_train.tar": LIBRARY,
            "ILSVRC2012_img_val.tar": LIBRARY,
            "ILSVRC2012_devkit_t12.tar.gz": LIBRARY,
            "real.json": LIBRARY,
        },
    ),
    Example(
        "imagenet21k",
        {"kind": "imagenet21k", "held_out": 0.1},
        synsets,
        root="whole.tar",
        images=12 + 40 + 25,
        fuzzed={"whole.tar": 0.3},
    ),
    Example(
        "webdataset",
        {"kind": "webdataset"},
        lambda: {"train-000000.tar": tar(shard(LABELS))},
        images=len(LABELS),
        splits={f"train-000000.tar/{row:06d}.jpg": "train" for row in range(len(LABELS))},
    ),
    Example(
        "webdataset_json",
        {"kind": "webdataset", "label": "json.label", "class_names": ["x", "y", "z"]},
        lambda: {"train-000000.tar": tar(shard(LABELS))},
        images=len(LABELS),
    ),
    Example("parquet", {"kind": "hf_parquet"}, parquet, images=len(LABELS) + 1, quarantined=len(BAD) - 1),
    *(
        Example(
            form,
            {"kind": "tfds"},
            lambda form=form: written(lambda folder: put_tfds(folder, form)),
            images=sum(map(sum, SPLITS.values())),
        )
        for form in FORMATS
    ),
    Example(
        "cifar10",
        {"kind": "cifar"},
        lambda: cifar_archive(10, "python"),
        images=6 * cifar.PER_BATCH,
        fuzzed={"cifar-10-python.tar.gz": 0.2},
    ),
    Example(
        "cifar100",
        {"kind": "cifar", "classes": 100},
        lambda: cifar_archive(100, "binary"),
        images=6 * cifar.PER_BATCH,
        fuzzed={"cifar-100-binary.tar.gz": 0.2},
    ),
    Example("idx", {"kind": "idx", "name": "ab", "class_names": ["a", "b"]}, pairs, images=24),
    Example(
        "shapes",
        {"kind": "shapes", "label": "colour", "images": 200, "dev_images": 20, "test_images": 40},
        images=260,
    ),
    Example("glyphs", {"kind": "glyphs", "images": 1000, "dev_images": 100}, images=1100),
    Example("digits", {"kind": "digits"}, images=1797),
    Example("scenes", {"kind": "scenes", "images": 20, "dev_images": 2, "test_images": 4}, images=26),
]
