"""Training batches of ours and of seven peers from the same images: `python benchmarks/loader.py`.

JPEGs of ImageNet's size (500 x 375, 4:2:0, 0.55 bytes a pixel), the same as `short_side: 256` of an ingest stores them,
and 50,000 raw images of CIFAR's shape; a random part resized to 224 and flipped, into uint8 batches of 256. Each arm is
a fresh process, on one core and then on two, with the best of 1, 2, 3 workers; rounds are interleaved, the table has
medians and ranges. The floor is simplejpeg's decoding and torch's resizing of the same parts, by as many threads, and
nothing else. What must be right of a loader (once each, damage) is tried on each.
Peers that are not there are installed into a folder of their own under the system's temporary folder.

    python benchmarks/loader.py [--images 8192] [--rounds 5] [--seconds 6]

Prints the tables and keeps them in benchmarks/results/loader.md. Figures of a busy machine mean little.
"""

from __future__ import annotations

import argparse
import importlib
import io
import json
import os
import shutil
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
import xxhash
from PIL import Image

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
SCRATCH = Path(tempfile.gettempdir()) / "vitflow-benchmark-loader"
PEERS = SCRATCH / "peers"
sys.path.append(str(PEERS))  # last: what is installed already wins
# Without their dependencies, so that none brings another torch or numpy along.
REQUIREMENTS = """
webdataset braceexpand litdata lightning-utilities tifffile obstore datasets dill multiprocess pandas python-dateutil
pytz tzdata six grain etils cloudpickle array-record fsspec importlib_resources more-itertools zipp portpicker
"""
BATCH, SIDE = 256, 224
POLICY = "resized_crop_flip"  # ours; the same distribution of parts as `part`, which peers and the floor take
CIFAR = 50_000
TARS = 6
WORKERS = (1, 2, 3)
SETS = {"originals": "500 x 375", "short side 256": "341 x 256", "raw 32 x 32": "CIFAR's shape, whole images"}

Arm = Callable[[Path, int], Iterator[tuple[list[int], Any]]]


# ------------------------------------------------------------------------------------------------- the data


def photograph(rng: np.random.Generator, width: int, height: int) -> Image.Image:
    """Smooth colours under noise that makes a JPEG of quality 90 about 0.55 bytes a pixel."""
    coarse = Image.fromarray(rng.integers(0, 256, (24, 32, 3), np.uint8))
    smooth = np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC), np.int16)
    noisy = smooth + rng.normal(0, 13, (height, width, 1)).astype(np.int16)
    return Image.fromarray(noisy.clip(0, 255).astype(np.uint8))


def encoded(number: int, short: int | None) -> bytes:
    """A JPEG; with a short side as ingest stores it then."""
    from ray_jobs.data.images import examine, shrunk

    file = io.BytesIO()
    photograph(np.random.default_rng(number), 500, 375).save(file, "JPEG", quality=90, subsampling="4:2:0")
    data = file.getvalue()
    return data if short is None else shrunk(data, examine(data), short)[0]


def prepare(folder: Path, name: str, images: int) -> None:
    """Every arm's own form of the same bytes."""
    import pyarrow as pa

    from ray_jobs.data.images import Hashes
    from ray_jobs.data.shards import INDEX, ImageSize, Sample, Shard, shard_file, write_dataset, write_shard

    if (folder / "done").exists():
        return
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "files").mkdir(parents=True)
    if name.startswith("raw"):
        pixels = np.random.default_rng(0).integers(0, 256, (images, 32, 32, 3), np.uint8)
        np.save(folder / "pixels.npy", pixels)
        datas, form, (width, height) = [image.tobytes() for image in pixels], "raw", (32, 32)
        image = ImageSize(height=32, width=32, channels=3)
    else:
        short = None if name == "originals" else 256
        with ThreadPoolExecutor() as pool:
            datas = list(pool.map(lambda number: encoded(number, short), range(images)))
        form, image = "jpeg", None
        width, height = Image.open(io.BytesIO(datas[0])).size
    samples, rows = [], []
    for number, data in enumerate(datas):
        (folder / "files" / f"{number:06d}.{form}").write_bytes(data)
        key = f"{number:06d}"
        samples.append(Sample(key, key, data, form, width, height, 3, number))
    each = 8192 if form == "raw" else 2048  # about as ingest cuts them
    for start in range(0, images, each):
        part, file = samples[start : start + each], shard_file(start // each)
        offsets = write_shard(folder / "ours" / file, part)
        for sample, offset in zip(part, offsets, strict=True):
            known = {field: getattr(sample, field) for field in Sample._fields if field != "image"}
            checksum = xxhash.xxh3_64_intdigest(sample.image)
            rows.append(known | dict.fromkeys(Hashes._fields, 0) | {
                "split": "train", "content_id": sample.key, "shard": start // each,
                "offset": offset, "length": len(sample.image), "checksum": checksum,
            })  # fmt: skip
    shards = [
        Shard(file=shard_file(n), rows=len(samples[n * each : (n + 1) * each]), bytes=1)
        for n in range(-(-images // each))
    ]
    classes = [str(number) for number in range(images)]  # so that a label says which image it is
    write_dataset(folder / "ours", name, classes, image, shards, pa.Table.from_pylist(rows, schema=INDEX))
    for tar in range(TARS):
        with tarfile.open(folder / f"images-{tar}.tar", "w", format=tarfile.USTAR_FORMAT) as archive:
            for number in range(tar, images, TARS):
                entry = tarfile.TarInfo(f"{number:06d}.bin")
                entry.size = len(datas[number])
                archive.addfile(entry, io.BytesIO(datas[number]))
    if importable("litdata"):
        from litdata.streaming.writer import BinaryWriter

        writer = BinaryWriter(str(folder / "lit"), chunk_bytes=2**26)
        for number, data in enumerate(datas):
            writer[number] = {"id": number, "image": data}
        writer.done()
        writer.merge()
    (folder / "done").touch()


def importable(name: str) -> bool:
    try:
        importlib.import_module(name)
    except Exception:  # a peer may fail in any way: then it is left out, and the table says so
        return False
    return True


# ------------------------------------------------------------------------------------------------- one image


def part(rng: np.random.Generator, height: int, width: int) -> tuple[int, int, int, int, bool]:
    """RandomResizedCrop's box and a flip."""
    for _ in range(10):
        area, aspect = (
            height * width * rng.uniform(0.08, 1),
            np.exp(rng.uniform(np.log(3 / 4), np.log(4 / 3))),
        )
        tall, wide = round((area / aspect) ** 0.5), round((area * aspect) ** 0.5)
        if tall <= height and wide <= width:
            top, left = rng.integers(height - tall + 1), rng.integers(width - wide + 1)
            return int(top), int(left), tall, wide, bool(rng.random() < 0.5)
    return 0, 0, height, width, bool(rng.random() < 0.5)


def with_simplejpeg(data: bytes, rng: np.random.Generator) -> np.ndarray:
    import simplejpeg

    pixels = simplejpeg.decode_jpeg(data)
    top, left, height, width, flipped = part(rng, *pixels.shape[:2])
    piece = np.ascontiguousarray(pixels[None, top : top + height, left : left + width])
    shaped = torch.from_numpy(piece).permute(0, 3, 1, 2)  # channels_last: twice as fast
    found = torch.nn.functional.interpolate(shaped, (SIDE, SIDE), mode="bilinear", antialias=True)
    found = found[0].permute(1, 2, 0)
    return (found.flip(1) if flipped else found).numpy()


def with_pillow(data: bytes, rng: np.random.Generator) -> np.ndarray:
    image = Image.open(io.BytesIO(data)).convert("RGB")
    top, left, height, width, flipped = part(rng, image.height, image.width)
    box = (left, top, left + width, top + height)
    image = image.resize((SIDE, SIDE), Image.Resampling.BILINEAR, box=box)
    return np.asarray(image.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if flipped else image)


def pixels_of(
    folder: Path, decode: Callable[[bytes, np.random.Generator], np.ndarray] = with_simplejpeg
) -> Any:
    """bytes -> pixels, for this set; what is random is drawn once a process."""
    if is_raw(folder):
        return lambda data: np.frombuffer(data, np.uint8).reshape(32, 32, 3)
    rng = np.random.default_rng(os.getpid())
    return lambda data: decode(data, rng)


def is_raw(folder: Path) -> bool:
    return (folder / "pixels.npy").exists()


def stacked(items: list[tuple[int, np.ndarray]]) -> tuple[list[int], torch.Tensor]:
    return [number for number, _ in items], torch.from_numpy(np.stack([image for _, image in items]))


# ------------------------------------------------------------------------------------------------- the arms


def ours(folder: Path, workers: int) -> Iterator[tuple[list[int], Any]]:
    from ray_jobs.augment import RandomCrop
    from ray_jobs.data.loader import Loader
    from ray_jobs.data.sampler import Sampler
    from ray_jobs.data.shards import Images, open_dataset
    from vit_model.config import Preprocessing

    data = open_dataset(folder / "ours")
    side = 32 if is_raw(folder) else SIDE
    given = Preprocessing(mean=(0.5,) * 3, std=(0.5,) * 3, resolution=side, channels=3)
    crop = None if is_raw(folder) else RandomCrop(POLICY, 0)
    train = Images(data, data.index("train"))
    sampler = Sampler(train, seed=0, batch_size=BATCH)
    with Loader(train, sampler, given, crop=crop, threads=workers) as batches:
        ours.loader = batches  # type: ignore[attr-defined]
        for _, images, labels in batches:
            yield labels.tolist(), images


class Files(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """A file an image, as ImageFolder has them; raw pixels from one mapped array."""

    def __init__(self, folder: Path, decode: Callable[[bytes, np.random.Generator], np.ndarray]) -> None:
        self.folder, self.decode, self.rng = folder, decode, None
        self.names = sorted(path.name for path in (folder / "files").iterdir())
        self.pixels = np.load(folder / "pixels.npy", mmap_mode="r") if is_raw(folder) else None

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, number: int) -> tuple[int, torch.Tensor]:
        if self.pixels is not None:
            return number, torch.from_numpy(np.array(self.pixels[number]))
        self.rng = self.rng or np.random.default_rng(os.getpid())
        data = (self.folder / "files" / self.names[number]).read_bytes()
        return number, torch.from_numpy(np.ascontiguousarray(self.decode(data, self.rng)))


def dataloader(folder: Path, workers: int, decode: Any = with_simplejpeg) -> Iterator[tuple[list[int], Any]]:
    loader = torch.utils.data.DataLoader(
        Files(folder, decode), BATCH, shuffle=True, num_workers=workers, drop_last=False,
        persistent_workers=True, worker_init_fn=lambda _: torch.set_num_threads(1),
    )  # fmt: skip
    while True:
        for ids, images in loader:
            yield ids.tolist(), images


def dataloader_pillow(folder: Path, workers: int) -> Iterator[tuple[list[int], Any]]:
    return dataloader(folder, workers, with_pillow)


def webdataset_arm(folder: Path, workers: int) -> Iterator[tuple[list[int], Any]]:
    import webdataset

    def decoded(sample: dict[str, Any]) -> tuple[int, np.ndarray]:
        return int(sample["__key__"]), pixels_of(folder)(sample["bin"])

    urls = [str(folder / f"images-{tar}.tar") for tar in range(TARS)]
    data = webdataset.WebDataset(urls, shardshuffle=TARS).shuffle(1000).map(decoded)
    batches = data.batched(BATCH, collation_fn=stacked)
    loader = torch.utils.data.DataLoader(batches, None, num_workers=workers)
    while True:
        yield from loader


def litdata_arm(folder: Path, workers: int) -> Iterator[tuple[list[int], Any]]:
    import litdata

    class Decoded(litdata.StreamingDataset):  # type: ignore[misc, name-defined]
        def __getitem__(self, index: Any) -> tuple[int, np.ndarray]:
            sample = super().__getitem__(index)
            return sample["id"], pixels_of(folder)(sample["image"])

    data = Decoded(str(folder / "lit"), shuffle=True, drop_last=False)
    loader = litdata.StreamingDataLoader(data, batch_size=BATCH, num_workers=workers, collate_fn=stacked)
    while True:
        yield from loader


def huggingface_arm(folder: Path, workers: int) -> Iterator[tuple[list[int], Any]]:
    import datasets

    datasets.disable_progress_bars()
    shards = [str(path) for path in sorted((folder / "ours" / "shards").iterdir())]
    data = datasets.Dataset.from_parquet(shards, cache_dir=str(folder / "hf"), columns=["key", "image"])

    def decoded(batch: dict[str, Any]) -> dict[str, Any]:
        decode = pixels_of(folder)
        return {"key": batch["key"], "image": [decode(image) for image in batch["image"]]}

    loader = torch.utils.data.DataLoader(
        data.with_transform(decoded), BATCH, shuffle=True, num_workers=workers, persistent_workers=True,
        collate_fn=lambda items: stacked([(int(item["key"]), item["image"]) for item in items]),
    )  # fmt: skip
    while True:
        yield from loader


def grain_arm(folder: Path, workers: int) -> Iterator[tuple[list[int], Any]]:
    import grain

    def decoded(number: int, rng: np.random.Generator) -> tuple[int, np.ndarray]:
        data = (folder / "files" / names[number]).read_bytes()
        return number, pixels_of(folder)(data) if is_raw(folder) else with_simplejpeg(data, rng)

    names = sorted(path.name for path in (folder / "files").iterdir())
    data = grain.MapDataset.range(len(names)).seed(0).shuffle().repeat().random_map(decoded)
    batches = data.to_iter_dataset(grain.ReadOptions(num_threads=workers)).batch(BATCH, batch_fn=stacked)
    return iter(batches)


def ray_arm(folder: Path, workers: int) -> Iterator[tuple[list[int], Any]]:
    import ray

    os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
    ray.init(num_cpus=workers, include_dashboard=False, log_to_driver=False, logging_level="error")
    ray.data.DataContext.get_current().enable_progress_bars = False

    def decoded(row: dict[str, Any]) -> dict[str, Any]:
        return {"key": int(row["key"]), "image": pixels_of(folder)(row["image"])}

    while True:
        data = ray.data.read_parquet(str(folder / "ours" / "shards"), columns=["key", "image"]).map(decoded)
        for batch in data.iter_torch_batches(batch_size=BATCH, local_shuffle_buffer_size=1024):
            yield batch["key"].tolist(), batch["image"]


def floor(folder: Path, workers: int) -> Iterator[tuple[list[int], Any]]:
    """Decoding and resizing alone, from memory: nothing is read, ordered, checked or put into a batch."""
    datas = [path.read_bytes() for path in sorted((folder / "files").iterdir())[:1024]]
    rng = np.random.default_rng(0)
    with ThreadPoolExecutor(workers) as pool:
        chunks = [range(start, start + 16) for start in range(0, BATCH, 16)]
        while True:
            list(pool.map(lambda chunk: [with_simplejpeg(datas[n % len(datas)], rng) for n in chunk], chunks))
            yield list(range(BATCH)), None


ARMS: dict[str, tuple[str, Arm]] = {
    "floor": ("floor: decode + resize", floor),
    "ours": ("vitflow", ours),
    "dataloader": ("DataLoader + simplejpeg", dataloader),
    "pillow": ("DataLoader + Pillow", dataloader_pillow),
    "webdataset": ("WebDataset", webdataset_arm),
    "litdata": ("LitData", litdata_arm),
    "datasets": ("Hugging Face datasets", huggingface_arm),
    "grain": ("Grain", grain_arm),
    "ray": ("Ray Data iter_torch_batches", ray_arm),
}


IMPORTS: dict[Arm, tuple[str, ...]] = {
    floor: ("simplejpeg",),
    ours: ("simplejpeg", "ray_jobs.data.loader"),
    dataloader: ("simplejpeg",),
    dataloader_pillow: ("PIL.JpegImagePlugin",),
    webdataset_arm: ("simplejpeg", "webdataset"),
    litdata_arm: ("simplejpeg", "litdata"),
    huggingface_arm: ("simplejpeg", "datasets"),
    grain_arm: ("simplejpeg", "grain"),
    ray_arm: ("simplejpeg", "ray.data"),
}


# ------------------------------------------------------------------------------------------------- in an arm's process


def cpu_seconds() -> float:
    total = 0.0
    for process in (me := psutil.Process(), *me.children(recursive=True)):
        try:
            times = process.cpu_times()
            total += times.user + times.system + times.children_user + times.children_system  # ended ones
        except psutil.Error:  # it ended meanwhile
            continue
    return total


def memory() -> int:
    total = 0
    for process in (me := psutil.Process(), *me.children(recursive=True)):
        try:
            total += process.memory_full_info().pss
        except psutil.Error:
            continue
    return total


def measure(arm: Arm, folder: Path, workers: int, seconds: float, warm: int) -> dict[str, float]:
    """Rates after `warm` images."""
    torch.set_num_threads(1)
    for module in IMPORTS[arm]:
        importlib.import_module(module)
    started = time.perf_counter()
    batches = arm(folder, workers)
    next(batches)
    first = time.perf_counter() - started
    done, peak = BATCH, memory()
    while done < warm:
        done += len(next(batches)[0])
    began, cpu, images = time.perf_counter(), cpu_seconds(), 0
    while (elapsed := time.perf_counter() - began) < seconds:
        images += len(next(batches)[0])
    return {
        "rate": images / elapsed,
        "cpu": (cpu_seconds() - cpu) / images * 1000,
        "memory": max(peak, memory()) / 2**20,
        "first": first,
    }


def gates(arm: Arm, folder: Path, images: int, truncated: Path, flipped: Path) -> dict[str, str]:
    """What comes of an epoch, of a flipped byte and of a truncated JPEG; in folders that have them."""
    found = {}
    seen: list[int] = []
    for ids, _ in arm(folder, 2):
        seen += ids
        if len(seen) >= images:
            break
    found["once"] = "pass" if sorted(seen[:images]) == list(range(images)) else "fail"
    for name, damaged in (("flipped", flipped), ("truncated", truncated)):
        try:
            count = 0
            for ids, _ in arm(damaged, 2):
                count += len(ids)
                if count >= images:
                    break
            replaced = arm is ours and ours.loader.substitutes  # type: ignore[attr-defined]
            found[name] = f"pass: {replaced} replaced, counted, told" if replaced else "fail: not noticed"
        except Exception as error:  # whatever a peer raises
            found[name] = f"stops: {type(error).__name__}"
    return found


def own_gates(folder: Path) -> dict[str, str]:
    """Of ours: the same at any world size, the same rest after a resume, and how long that takes."""
    from ray_jobs.augment import RandomCrop
    from ray_jobs.data.loader import Loader
    from ray_jobs.data.sampler import Sampler
    from ray_jobs.data.shards import Images, open_dataset
    from vit_model.config import Preprocessing

    data = open_dataset(folder / "ours")
    train = Images(data, data.index("train"))
    given = Preprocessing(mean=(0.5,) * 3, std=(0.5,) * 3, resolution=SIDE, channels=3)
    crop = RandomCrop(POLICY, 0)

    def loader(samples: int, **sampling: int) -> Loader:
        made = Loader(train, Sampler(train, seed=0, **sampling), given, crop=crop, threads=2)
        made.load_state_dict(made.state_dict() | {"samples": samples})
        return made

    def digests(samples: int = 0, world: int = 1, steps: int = 4) -> list[int]:
        ranks = [loader(samples, batch_size=64, rank=rank, world=world) for rank in range(world)]
        found = [
            xxhash.xxh3_64_intdigest(b"".join(next(rank).images.numpy().tobytes() for rank in ranks))
            for _ in range(steps)
        ]
        for rank in ranks:
            rank.__exit__()
        return found

    whole = digests()
    worlds = all(digests(world=world) == whole for world in (2, 4))
    began = time.perf_counter()
    resumed = loader(10**12 + 64, batch_size=BATCH)
    seconds = time.perf_counter() - began
    next(resumed)
    first = time.perf_counter() - began
    resumed.__exit__()
    again = digests(128, steps=2) == whole[2:]
    return {
        "worlds": "pass" if worlds else "fail",
        "resume": "pass" if again else "fail",
        "resume_seconds": f"{seconds * 1000:.0f} ms, its first batch after {first:.2f} s",
    }


# ------------------------------------------------------------------------------------------------- the whole


def run(cores: int, *arguments: str) -> dict[str, Any]:
    """An arm in a fresh process on so many cores; {} with what it said where it failed."""
    allowed = ",".join(map(str, sorted(os.sched_getaffinity(0))[:cores]))
    command = ["taskset", "-c", allowed, sys.executable, __file__, *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "RAY_DATA_DISABLE_PROGRESS_BARS": "1"}
    try:
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600)
        return dict(json.loads(done.stdout.strip().splitlines()[-1]))
    except subprocess.TimeoutExpired:
        return {"error": "took more than ten minutes"}
    except (IndexError, ValueError):
        return {"error": (done.stderr.strip().splitlines() or ["nothing"])[-1][:120]}


def damaged_copies(folder: Path) -> tuple[Path, Path]:
    """(a truncated JPEG, a flipped byte in the middle of one) in the same place of every arm's form."""
    copies = []
    for name in ("truncated", "flipped"):
        copy = folder.with_name(f"{folder.name}-{name}")
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(folder, copy, ignore=shutil.ignore_patterns("hf"))
        data = bytearray((folder / "files" / "000003.jpeg").read_bytes())
        other = bytearray(data)
        if name == "flipped":
            other[len(other) // 2] ^= 0x10
        else:
            other[len(other) // 3 :] = bytes(len(other) - len(other) // 3)
        for path in copy.rglob("*"):
            if path.is_file() and (content := path.read_bytes()).count(data):
                path.write_bytes(content.replace(data, other))
        copies.append(copy)
    return copies[0], copies[1]


def table(name: str, cores: int, arms: list[str], results: dict[str, list[dict[str, float]]],
          workers: dict[str, int], errors: dict[str, str]) -> list[str]:  # fmt: skip
    lines = [
        "", f"## {name} ({SETS[name]}), {cores} core{'s' * (cores > 1)}", "",
        "| loader | workers | images/s, median (range) | of the floor | CPU s a 1,000 images | MiB | first batch, s |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]  # fmt: skip
    for arm in arms:
        if not results.get(arm):
            lines.append(f"| {ARMS[arm][0]} | left out: {errors.get(arm, 'not installed')} | | | | | |")
            continue
        rounds = results[arm]
        middle = {key: statistics.median(each[key] for each in rounds) for key in rounds[0]}
        rates = [each["rate"] for each in rounds]
        shares = [a["rate"] / b["rate"] for a, b in zip(rounds, results.get("floor", []), strict=False)]
        share = f"{statistics.median(shares):.0%}" if shares else "-"
        lines.append(
            f"| {ARMS[arm][0]} | {workers[arm]} | {middle['rate']:,.0f} ({min(rates):,.0f}-{max(rates):,.0f}) | "
            f"{share} | {middle['cpu']:.3g} | {middle['memory']:,.0f} | {middle['first']:.2f} |"
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--images", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=6)
    parser.add_argument("--cores", type=int, nargs="*", default=[1, 2])
    parser.add_argument("--sets", nargs="*", default=list(SETS))
    parser.add_argument("--arms", nargs="*", default=list(ARMS))
    parser.add_argument("--one", nargs=5, help=argparse.SUPPRESS)  # what, arm, folder, workers, images
    options = parser.parse_args()
    if options.one:
        what, name, folder, workers, images = options.one
        arm = ARMS[name][1]
        if what == "gates":
            clean = Path(folder)
            copies = [clean.with_name(f"{clean.name}-{kind}") for kind in ("truncated", "flipped")]
            answer: dict[str, Any] = gates(arm, clean, int(images), *copies)
            answer |= own_gates(clean) if name == "ours" else {}
        else:
            warm = min(int(images), 20_000)
            answer = measure(arm, Path(folder), int(workers), options.seconds, warm)
        print("\n" + json.dumps(answer), flush=True)
        os._exit(0)  # workers of a loader that has no end

    if not PEERS.exists():
        command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(PEERS)]
        subprocess.run([*command, *REQUIREMENTS.split()], check=False)
    before = os.getloadavg()[0]
    lines: list[str] = []
    for name in options.sets:
        count = CIFAR if name.startswith("raw") else options.images
        folder = SCRATCH / f"{name} {count}".replace(" ", "-")
        prepare(folder, name, count)
        skipped = {"floor", "pillow"} if name.startswith("raw") else set()
        arms = [arm for arm in options.arms if arm not in skipped]

        def once(
            cores: int, arm: str, workers: int, folder: Path = folder, count: int = count
        ) -> dict[str, Any]:
            return run(cores, "--seconds", str(options.seconds), "--one", "rate", arm, str(folder), str(workers),
                       str(count))  # fmt: skip

        for cores in options.cores:
            best, errors, results = {}, {}, {arm: [] for arm in arms}
            for arm in arms:
                tried = {workers: once(cores, arm, workers) for workers in WORKERS}
                if failed := [each["error"] for each in tried.values() if "error" in each]:
                    errors[arm] = failed[0]
                fit = {workers: each["rate"] for workers, each in tried.items() if "rate" in each}
                if fit:
                    best[arm] = max(fit, key=fit.__getitem__)
            for _ in range(options.rounds):
                for arm, workers in best.items():
                    if "rate" in (found := once(cores, arm, workers)):
                        results[arm].append(found)
            lines += table(name, cores, arms, results, best, errors)
            print(*lines[-len(arms) - 5 :], sep="\n", flush=True)
        if name == "originals":
            damaged_copies(folder)
            said = {
                arm: run(2, "--one", "gates", arm, str(folder), "2", str(count))
                for arm in arms
                if arm != "floor"
            }
            lines += ["", "## What must be right", "",
                      "| loader | each image once an epoch | a flipped byte | a truncated JPEG "
                      "| same batches at world 1, 2, 4 | resume: same rest | time to resume |",
                      "|---|---|---|---|---|---|---|"]  # fmt: skip
            for arm, found in said.items():
                error = f"failed: {found['error']}" if "error" in found else ""
                cells = [str(found.get(key, error or "not tried")) for key in
                         ("once", "flipped", "truncated", "worlds", "resume", "resume_seconds")]  # fmt: skip
                lines.append(f"| {ARMS[arm][0]} | {' | '.join(cells)} |")
            print(*lines[-len(said) - 4 :], sep="\n", flush=True)
    from ray_jobs.process.stage import processor

    head = [
        "# Training batches, against others' loaders", "",
        f"`python benchmarks/loader.py {' '.join(sys.argv[1:])}`, {datetime.now(UTC):%Y-%m-%d}, {processor()}, "
        f"{os.cpu_count()} cores, {options.images:,} JPEGs, load before: {before:.1f}, "
        f"after: {os.getloadavg()[0]:.1f}.",
        f"A random part of each image resized to {SIDE} and flipped, uint8 batches of {BATCH}; medians over "
        f"{options.rounds} interleaved rounds, each in a fresh process, with the best of {WORKERS} workers or threads.",
    ]  # fmt: skip
    (ROOT / "benchmarks" / "results" / "loader.md").write_text("\n".join([*head, *lines]) + "\n")


if __name__ == "__main__":
    main()
