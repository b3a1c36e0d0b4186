"""The loaders: each yields batches of (numbers of the images, pixels) of a set, without end, with `workers` workers.

A function imports its loader itself: one that cannot be imported must not end the others, nor add to their memory.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from loading.data import RAW_SIDE, SCRATCH, TARS, is_raw, names
from loading.decoding import SIDE, Decode, decoder, with_pillow, with_simplejpeg

if TYPE_CHECKING:
    from ray_jobs.data.loader import Loader

BATCH = 256
CROP = "resized_crop_flip"  # ours; `decoding.crop` is the same distribution
PEERS = SCRATCH / "peers"
# Without their dependencies: none may bring another torch or numpy along.
REQUIREMENTS = """
webdataset braceexpand litdata lightning-utilities tifffile obstore datasets dill multiprocess pandas python-dateutil
pytz tzdata six grain etils cloudpickle array-record fsspec importlib_resources more-itertools zipp portpicker
"""
sys.path.append(str(PEERS))  # last: what is installed already wins

Batches = Iterator[tuple[list[int], Any]]


class Arm(NamedTuple):
    """A loader to measure."""

    title: str
    batches: Callable[[Path, int], Batches]
    imports: tuple[str, ...]
    """Modules that are imported before the clock starts."""
    reads_raw: bool = True


# ------------------------------------------------------------------------------------------------- ours


def open_loader(folder: Path, threads: int, **sampling: int) -> Loader:
    """Our loader of a set."""
    from ray_jobs.augment import RandomCrop
    from ray_jobs.data.loader import Loader
    from ray_jobs.data.sampler import Sampler
    from ray_jobs.data.shards import Images, open_dataset
    from vit_model.contract import Preprocessing

    data = open_dataset(folder / "ours")
    train = Images(data, data.index("train"))
    side = RAW_SIDE if is_raw(folder) else SIDE
    preprocessing = Preprocessing(mean=(0.5,) * 3, std=(0.5,) * 3, resolution=side, channels=3)
    crop = None if is_raw(folder) else RandomCrop(CROP, 0)
    sampler = Sampler(train, seed=0, **{"batch_size": BATCH, **sampling})
    return Loader(train, sampler, preprocessing, crop=crop, threads=threads)


def ours(folder: Path, workers: int) -> Batches:
    with open_loader(folder, workers) as loader:
        yield from numbered(loader)


def numbered(loader: Loader) -> Batches:
    """Its batches, as those of the other arms."""
    for _, images, labels in loader:
        yield labels.tolist(), images


# ------------------------------------------------------------------------------------------------- others


class Files(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """One file per image, as in ImageFolder; raw pixels from one mapped array."""

    def __init__(self, folder: Path, decode: Decode) -> None:
        self.folder, self.decode, self.rng = folder, decode, None
        self.names = names(folder)
        self.pixels = np.load(folder / "pixels.npy", mmap_mode="r") if is_raw(folder) else None

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, number: int) -> tuple[int, torch.Tensor]:
        if self.pixels is not None:
            return number, torch.from_numpy(np.array(self.pixels[number]))
        self.rng = self.rng or np.random.default_rng(os.getpid())
        data = (self.folder / "files" / self.names[number]).read_bytes()
        return number, torch.from_numpy(np.ascontiguousarray(self.decode(data, self.rng)))


def dataloader(folder: Path, workers: int, decode: Decode = with_simplejpeg) -> Batches:
    loader = torch.utils.data.DataLoader(
        Files(folder, decode),
        BATCH,
        shuffle=True,
        num_workers=workers,
        persistent_workers=True,
        worker_init_fn=lambda _: torch.set_num_threads(1),
    )
    while True:
        for numbers, images in loader:
            yield numbers.tolist(), images


def dataloader_pillow(folder: Path, workers: int) -> Batches:
    return dataloader(folder, workers, with_pillow)


def stacked(items: list[tuple[int, np.ndarray]]) -> tuple[list[int], torch.Tensor]:
    return [number for number, _ in items], torch.from_numpy(np.stack([image for _, image in items]))


def webdataset(folder: Path, workers: int) -> Batches:
    from webdataset import WebDataset

    def decoded(sample: dict[str, Any]) -> tuple[int, np.ndarray]:
        return int(sample["__key__"]), decoder(folder)(sample["bin"])

    tars = [str(folder / f"images-{tar}.tar") for tar in range(TARS)]
    data = WebDataset(tars, shardshuffle=TARS).shuffle(1000).map(decoded).batched(BATCH, collation_fn=stacked)
    loader = torch.utils.data.DataLoader(data, None, num_workers=workers)
    while True:
        yield from loader


def litdata(folder: Path, workers: int) -> Batches:
    from litdata import StreamingDataLoader, StreamingDataset

    class Decoded(StreamingDataset):  # type: ignore[misc]
        def __getitem__(self, index: Any) -> tuple[int, np.ndarray]:
            sample = super().__getitem__(index)
            return sample["id"], decoder(folder)(sample["image"])

    data = Decoded(str(folder / "lit"), shuffle=True, drop_last=False)
    loader = StreamingDataLoader(data, batch_size=BATCH, num_workers=workers, collate_fn=stacked)
    while True:
        yield from loader


def hugging_face(folder: Path, workers: int) -> Batches:
    from datasets import Dataset, disable_progress_bars

    disable_progress_bars()
    shards = [str(path) for path in sorted((folder / "ours" / "shards").iterdir())]
    data = Dataset.from_parquet(shards, cache_dir=str(folder / "hf"), columns=["key", "image"])

    def decoded(batch: dict[str, Any]) -> dict[str, Any]:
        return {"key": batch["key"], "image": [decoder(folder)(image) for image in batch["image"]]}

    loader = torch.utils.data.DataLoader(
        data.with_transform(decoded),
        BATCH,
        shuffle=True,
        num_workers=workers,
        persistent_workers=True,
        collate_fn=lambda items: stacked([(int(item["key"]), item["image"]) for item in items]),
    )
    while True:
        yield from loader


def grain(folder: Path, workers: int) -> Batches:
    from grain import MapDataset, ReadOptions

    files = names(folder)

    def decoded(number: int, rng: np.random.Generator) -> tuple[int, np.ndarray]:
        data = (folder / "files" / files[number]).read_bytes()
        return number, decoder(folder)(data) if is_raw(folder) else with_simplejpeg(data, rng)

    data = MapDataset.range(len(files)).seed(0).shuffle().repeat().random_map(decoded)
    return iter(data.to_iter_dataset(ReadOptions(num_threads=workers)).batch(BATCH, batch_fn=stacked))


def ray_data(folder: Path, workers: int) -> Batches:
    import ray

    os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
    ray.init(num_cpus=workers, include_dashboard=False, log_to_driver=False, logging_level="error")
    ray.data.DataContext.get_current().enable_progress_bars = False

    def decoded(row: dict[str, Any]) -> dict[str, Any]:
        return {"key": int(row["key"]), "image": decoder(folder)(row["image"])}

    while True:
        data = ray.data.read_parquet(str(folder / "ours" / "shards"), columns=["key", "image"]).map(decoded)
        for batch in data.iter_torch_batches(batch_size=BATCH, local_shuffle_buffer_size=1024):
            yield batch["key"].tolist(), batch["image"]


def floor(folder: Path, workers: int) -> Batches:
    """Decode and resize alone, from memory: nothing is read, ordered, checked or put into a batch."""
    encoded = [(folder / "files" / name).read_bytes() for name in names(folder)[:1024]]
    rng = np.random.default_rng(0)
    chunks = [range(start, start + 16) for start in range(0, BATCH, 16)]

    def decode(chunk: range) -> None:
        for number in chunk:
            with_simplejpeg(encoded[number % len(encoded)], rng)

    with ThreadPoolExecutor(workers) as pool:
        while True:
            list(pool.map(decode, chunks))
            yield list(range(BATCH)), None


ARMS = {
    "floor": Arm("floor: decode + resize", floor, (), reads_raw=False),
    "ours": Arm("vitflow", ours, ("ray_jobs.data.loader",)),
    "dataloader": Arm("DataLoader + simplejpeg", dataloader, ()),
    "pillow": Arm("DataLoader + Pillow", dataloader_pillow, ("PIL.JpegImagePlugin",), reads_raw=False),
    "webdataset": Arm("WebDataset", webdataset, ("webdataset",)),
    "litdata": Arm("LitData", litdata, ("litdata",)),
    "datasets": Arm("Hugging Face datasets", hugging_face, ("datasets",)),
    "grain": Arm("Grain", grain, ("grain",)),
    "ray": Arm("Ray Data iter_torch_batches", ray_data, ("ray.data",)),
}
