"""The images, in the form that each loader reads: files, one array, our shards, tars, LitData's chunks.

Three sets: JPEGs of ImageNet's size (500 x 375, 4:2:0, 0.55 bytes per pixel), the same as an ingest stores them with
`short_side: 256`, and raw images of CIFAR's shape. Functions import our modules themselves, because a process that
measures a peer must not hold them.
"""

from __future__ import annotations

import io
import shutil
import tarfile
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from PIL import Image

SCRATCH = Path(tempfile.gettempdir()) / "vitflow-benchmark-loader"
SETS = {"originals": "500 x 375", "short side 256": "341 x 256", "raw 32 x 32": "CIFAR's shape, whole images"}
RAW_IMAGES, RAW_SIDE = 50_000, 32
TARS = 6
PER_SHARD = {"raw": 8192, "jpeg": 2048}  # about as ingest cuts them
DAMAGES = ("truncated", "flipped")


def prepare(name: str, images: int) -> tuple[Path, int]:
    """Return the folder of a set, which is made only once, and its number of images."""
    is_raw_set = name.startswith("raw")
    count = RAW_IMAGES if is_raw_set else images
    folder = SCRATCH / f"{name} {count}".replace(" ", "-")
    if not (folder / "done").exists():
        shutil.rmtree(folder, ignore_errors=True)
        (folder / "files").mkdir(parents=True)
        encoded = raw_images(folder, count) if is_raw_set else jpegs(name, count)
        write_forms(folder, name, encoded)
        (folder / "done").touch()
    return folder, count


def is_raw(folder: Path) -> bool:
    return (folder / "pixels.npy").exists()


def names(folder: Path) -> list[str]:
    """The files of a set; image n is at place n."""
    return sorted(path.name for path in (folder / "files").iterdir())


def raw_images(folder: Path, count: int) -> list[bytes]:
    """Random pixels, also written as one array."""
    pixels = np.random.default_rng(0).integers(0, 256, (count, RAW_SIDE, RAW_SIDE, 3), np.uint8)
    np.save(folder / "pixels.npy", pixels)
    return [image.tobytes() for image in pixels]


def jpegs(name: str, count: int) -> list[bytes]:
    short_side = None if name == "originals" else 256
    with ThreadPoolExecutor() as pool:
        return list(pool.map(lambda number: jpeg(number, short_side), range(count)))


def jpeg(number: int, short_side: int | None) -> bytes:
    """A function of its number; with a short side, as ingest stores it."""
    from ray_jobs.data.images import examine, shrunk

    file = io.BytesIO()
    photograph(np.random.default_rng(number), 500, 375).save(file, "JPEG", quality=90, subsampling="4:2:0")
    data = file.getvalue()
    return data if short_side is None else shrunk(data, examine(data), short_side)[0]


def photograph(rng: np.random.Generator, width: int, height: int) -> Image.Image:
    """Smooth colours under noise, which makes a JPEG of quality 90 about 0.55 bytes per pixel."""
    coarse = Image.fromarray(rng.integers(0, 256, (24, 32, 3), np.uint8))
    smooth = np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC), np.int16)
    noisy = smooth + rng.normal(0, 13, (height, width, 1)).astype(np.int16)
    return Image.fromarray(noisy.clip(0, 255).astype(np.uint8))


def write_forms(folder: Path, name: str, encoded: Sequence[bytes]) -> None:
    """Write the same bytes in every form. An image's label is its number, so a batch says which images it has."""
    from ray_jobs.data.columns import Sample
    from ray_jobs.data.samples import write_samples
    from ray_jobs.data.shards import ImageSize

    if is_raw(folder):
        form, width, height = "raw", RAW_SIDE, RAW_SIDE
        image = ImageSize(height=height, width=width, channels=3)
    else:
        form, image = "jpeg", None
        width, height = Image.open(io.BytesIO(encoded[0])).size
    keys = [f"{number:06d}" for number in range(len(encoded))]
    for key, data in zip(keys, encoded, strict=True):
        (folder / "files" / f"{key}.{form}").write_bytes(data)
    samples = [
        Sample(key, key, data, form, width, height, 3, number)
        for number, (key, data) in enumerate(zip(keys, encoded, strict=True))
    ]
    write_samples(folder / "ours", name, keys, image, {"train": samples}, per_shard=PER_SHARD[form])
    for tar in range(TARS):
        with tarfile.open(folder / f"images-{tar}.tar", "w", format=tarfile.USTAR_FORMAT) as archive:
            for number in range(tar, len(encoded), TARS):
                entry = tarfile.TarInfo(f"{keys[number]}.bin")
                entry.size = len(encoded[number])
                archive.addfile(entry, io.BytesIO(encoded[number]))
    write_litdata(folder / "lit", encoded)


def write_litdata(folder: Path, encoded: Sequence[bytes]) -> None:
    """Write LitData's chunks, if it can be imported."""
    try:
        from litdata.streaming.writer import BinaryWriter
    except Exception:  # a peer may fail in any way; the table then says that it was left out
        return
    writer = BinaryWriter(str(folder), chunk_bytes=2**26)
    for number, data in enumerate(encoded):
        writer[number] = {"id": number, "image": data}
    writer.done()
    writer.merge()


def damaged_folder(folder: Path, damage: str) -> Path:
    return folder.with_name(f"{folder.name}-{damage}")


def write_damaged(folder: Path) -> None:
    """Copy a set twice, with image 3 truncated, and with one flipped bit in the middle of it, in every form."""
    data = (folder / "files" / "000003.jpeg").read_bytes()
    for damage in DAMAGES:
        other = bytearray(data)
        if damage == "flipped":
            other[len(other) // 2] ^= 0x10
        else:
            other[len(other) // 3 :] = bytes(len(other) - len(other) // 3)
        copy = damaged_folder(folder, damage)
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(folder, copy, ignore=shutil.ignore_patterns("hf"))
        for path in copy.rglob("*"):
            if path.is_file() and (content := path.read_bytes()).count(data):
                path.write_bytes(content.replace(data, other))
