"""Ingest of a tar of JPEGs, compared with other writers of training files: `python benchmarks/ingest.py`.

It makes 8,192 different JPEGs of 500 x 375 pixels in a WebDataset tar; peers that cannot read tars get the same files
in a folder. Each contender is a fresh process on the same two cores. It first ingests a small set, so that imports and
worker processes are ready, then the whole set, timed, with the files in the page cache and no pending writes.
Contenders take turns, each round in another order. The table says what each does with an image; "floor" is the cost of
reading, sha256 and a full decode alone, with simplejpeg in two processes.

Ours is the whole stage: sha256 of the source, listing, shards, index, quarantine, copies, card, and every file's
sha256, durably on the disk. It reads every coefficient of a JPEG, which detects damage and takes most of a decoder's
time, but decodes only grey pixels at a fraction of the size, because it needs no others.

Peers are installed from PyPI into a temporary folder. Prints the table and writes it to benchmarks/results/; takes
about 15 minutes. To try it quickly:

    python benchmarks/ingest.py --images 512 --rounds 1 --no-keep
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import io
import json
import multiprocessing
import os
import shutil
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from common import ROOT, install, keep, setting, spread

REQUIREMENTS = (
    "webdataset==1.0.2",
    "braceexpand==0.1.7",
    "litdata==0.2.76",
    "lightning-utilities==0.15.3",
    "obstore==0.12.1",
    "tifffile==2026.3.3",
    "torchdata==0.11.0",
    "datasets==5.2.0",
    "dill==0.4.1",
    "multiprocess==0.70.19",
    "huggingface_hub==2.4.0",
    "fsspec==2026.9.0",
    "tqdm==4.70.1",
    "pandas==3.1.1",
)
CORES, WARM = 2, 64
WIDTH, HEIGHT, QUALITY, NOISE = 500, 375, 90, 13.0


# ------------------------------------------------------------------------------------------------- contenders
# Each takes the folder of a set (data.tar, images/) and an empty folder to write into.


def ours(data: Path, out: Path) -> None:
    """Run the real stage, on the running Ray."""
    from pipelines.spec import Ingest
    from pipelines.store import open_store
    from ray_jobs import ingest
    from tests.support.records import make_context

    source = {"kind": "webdataset", "root": str(data / "data.tar")}
    config = Ingest.model_validate({"job": "ingest", "source": source})
    store = open_store(str(out / "store"))
    result = ingest.main(make_context(store, config))
    assert result.metrics["images"] + result.metrics["left_out"] == len(list((data / "images").iterdir()))


def _begin() -> None:
    import pandas  # noqa: F401  # pyarrow imports it when it first makes an array

    import ray_jobs.ingest  # noqa: F401

    time.sleep(1)  # so that every process gets one of these tasks


def floor(data: Path, out: Path) -> None:
    in_two(_floor, data, out)


def _floor(data: Path, out: Path, part: int) -> None:
    import simplejpeg

    with tarfile.open(data / "data.tar") as tar:
        places = [(one.offset_data, one.size) for one in tar if one.name.endswith(".jpg")][part::CORES]
    with (data / "data.tar").open("rb") as file:
        for offset, size in places:
            image = os.pread(file.fileno(), size, offset)
            hashlib.sha256(image).digest()
            simplejpeg.decode_jpeg(image)


def ray_read_images(data: Path, out: Path) -> None:
    import ray

    ray.data.read_images(str(data / "images")).write_parquet(str(out))


def ray_read_binary_files(data: Path, out: Path) -> None:
    import ray

    ray.data.read_binary_files(str(data / "images")).write_parquet(str(out))


def webdataset(data: Path, out: Path) -> None:
    in_two(_webdataset, data, out)


def _webdataset(data: Path, out: Path, part: int) -> None:
    import webdataset as wds

    with wds.ShardWriter(f"{out}/{part}-%05d.tar", maxsize=256 * 2**20, verbose=0) as writer:
        samples = wds.WebDataset(str(data / "data.tar"), shardshuffle=False, empty_check=False)
        for number, sample in enumerate(samples):
            if number % CORES == part:
                writer.write({name: sample[name] for name in ("__key__", "jpg", "cls")})


def webdataset_decoding(data: Path, out: Path) -> None:
    in_two(_webdataset_decoding, data, out)


def _webdataset_decoding(data: Path, out: Path, part: int) -> None:
    """Decode every image as a check; write the bytes that were read."""
    import webdataset as wds

    with wds.ShardWriter(f"{out}/{part}-%05d.tar", maxsize=256 * 2**20, verbose=0) as writer:
        samples = wds.WebDataset(str(data / "data.tar"), shardshuffle=False, empty_check=False)
        decoder = wds.imagehandler("rgb8")
        for number, sample in enumerate(samples):
            if number % CORES == part:
                assert decoder("jpg", sample["jpg"]).shape == (HEIGHT, WIDTH, 3)
                writer.write({name: sample[name] for name in ("__key__", "jpg", "cls")})


def litdata(data: Path, out: Path) -> None:
    import litdata

    files = sorted(map(str, (data / "images").iterdir()))
    litdata.optimize(
        _litdata_sample, files, str(out / "optimized"), num_workers=CORES, chunk_bytes="256MB", verbose=False
    )


def _litdata_sample(file: str) -> dict[str, object]:
    from PIL import Image

    return {"image": Image.open(file), "label": int(Path(file).stem) % 10}


def hugging_face(data: Path, out: Path) -> None:
    in_two(_hugging_face, data, out)


def _hugging_face(data: Path, out: Path, part: int) -> None:
    from datasets import Dataset, Image, disable_progress_bars

    disable_progress_bars()
    files = sorted(map(str, (data / "images").iterdir()))[part::CORES]
    labels = [int(Path(file).stem) % 10 for file in files]
    dataset = Dataset.from_dict({"image": files, "label": labels}).cast_column("image", Image())
    # Without this, it writes only the file names.
    dataset = dataset.map(_embedded, batched=True, batch_size=256)
    dataset.to_parquet(str(out / f"{part}.parquet"))


def _embedded(rows: dict[str, list[object]]) -> dict[str, list[object]]:
    return {"image": [{"bytes": Path(str(one.filename)).read_bytes(), "path": None} for one in rows["image"]]}  # type: ignore[attr-defined]


Contender = Callable[[Path, Path], None]
CONTENDERS: dict[str, tuple[str, str, Contender]] = {  # what it reads, what it does with an image
    "ours": ("tar", "decodes, 2 hashes of bytes, 1 of pixels, copies found", ours),
    "floor: read, sha256, decode": ("tar", "decodes, hashes, writes nothing", floor),
    "Ray Data read_images, write_parquet": ("files", "decodes, writes pixels", ray_read_images),
    "Ray Data read_binary_files, write_parquet": ("files", "nothing", ray_read_binary_files),
    "WebDataset ShardWriter": ("tar", "nothing", webdataset),
    "WebDataset ShardWriter, decoding": ("tar", "decodes", webdataset_decoding),
    "LitData optimize": ("files", "opens, does not decode", litdata),
    "Hugging Face datasets to_parquet": ("files", "opens, does not decode", hugging_face),
}

IMPORTED: dict[Contender, tuple[str, ...]] = {
    floor: ("simplejpeg",),
    webdataset: ("webdataset",),
    webdataset_decoding: ("webdataset", "PIL.Image"),
    hugging_face: ("datasets",),
}


def in_two(work: Callable[[Path, Path, int], None], data: Path, out: Path) -> None:
    """Run `work` in one process per core."""
    processes = [multiprocessing.Process(target=work, args=(data, out, part)) for part in range(CORES)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        assert process.exitcode == 0


# ------------------------------------------------------------------------------------------------- measuring


def main() -> None:
    """Measure everything and keep the table."""
    given = argparse.ArgumentParser()
    given.add_argument("--images", type=int, default=8192)
    given.add_argument("--rounds", type=int, default=5)
    given.add_argument("--folder", type=Path, help="where to keep data and peers; default: a temporary folder")
    given.add_argument("--only", nargs="*", default=list(CONTENDERS), choices=list(CONTENDERS))
    given.add_argument("--no-keep", action="store_true", help="print the table only")
    given.add_argument("--contender", help="used internally, by the measured processes")
    options = given.parse_args()
    if options.contender:
        print(json.dumps(measure(options.contender, options.folder)), file=sys.stderr)
        return
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:CORES])
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="vfi-") as temporary:
        folder = options.folder or Path(temporary)
        if not (folder / "peers").is_dir():  # only the measured processes have it on their path
            install(folder / "peers", *REQUIREMENTS)
        for name, number in (("small", WARM), (f"all-{options.images}", options.images)):
            make(folder / name, number)
        rounds: dict[str, list[dict[str, float]]] = {name: [] for name in options.only}
        for turn in range(options.rounds):
            for name in list(rounds)[turn % len(rounds) :] + list(rounds)[: turn % len(rounds)]:
                if (found := in_process(name, folder, f"all-{options.images}")) is not None:
                    rounds[name].append(found)
                    rate = options.images / found["seconds"]
                    print(f"{name}: {rate:,.0f} images/s", file=sys.stderr, flush=True)
        size = (folder / f"all-{options.images}" / "data.tar").stat().st_size
    keep("ingest.md", table(rounds, options, size / options.images, load), is_written=not options.no_keep)


def measure(name: str, folder: Path) -> dict[str, float]:
    """Return one contender's seconds for the set in `folder`, after the small set beside it, in this process."""
    work = CONTENDERS[name][2]
    for module in IMPORTED.get(work, ()):  # before the processes of `in_two` are forked
        importlib.import_module(module)
    if name.startswith(("ours", "Ray")):
        import ray

        ray.init(num_cpus=CORES, include_dashboard=False, log_to_driver=False, logging_level="error")
    if name == "ours":  # the small set is one shard, so it warms up only one of the processes
        ray.get([ray.remote(_begin).remote() for _ in range(CORES)])
    with tempfile.TemporaryDirectory(prefix="out-", dir=folder.parent) as out:
        for data in (folder.parent / "small", folder):
            target = Path(out, data.name)
            target.mkdir()
            for file in filter(Path.is_file, data.rglob("*")):
                file.read_bytes()  # fills the page cache
            os.sync()  # so that it does not wait for writes of the previous contender
            began = time.perf_counter()
            work(data, target)
            seconds = time.perf_counter() - began
        written = sum(path.stat().st_size for path in target.rglob("*") if path.is_file())
    return {"seconds": seconds, "written": float(written)}


def in_process(name: str, folder: Path, data: str) -> dict[str, float] | None:
    """Measure in a fresh process; if that fails, print a line and return None."""
    path = os.pathsep.join([str(ROOT), str(folder / "peers")])
    with tempfile.TemporaryDirectory(prefix="vfh-") as home:
        environment = os.environ | {"PYTHONPATH": path, "HOME": home, "XDG_CACHE_HOME": home}
        environment |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "HF_HOME": home, "TQDM_DISABLE": "1"}
        environment |= {
            "RAY_DEDUP_LOGS": "0",
            "DATA_OPTIMIZER_CACHE_FOLDER": home,
            "PYTHONWARNINGS": "ignore",
        }
        command = [sys.executable, __file__, "--contender", name, "--folder", str(folder / data)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
    answer = done.stderr.strip().splitlines()[-1:] or [""]
    if done.returncode:
        print(f"{name} failed: {answer[0]}", file=sys.stderr, flush=True)
        return None
    return dict(json.loads(answer[0]))


def make(folder: Path, number: int) -> None:
    """Write data.tar and images/ with `number` different JPEGs: crops of two photographs, with noise, in 10 classes."""
    if folder.is_dir():
        return
    partial = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    (partial / "images").mkdir(parents=True)
    with tarfile.open(partial / "data.tar", "w") as tar, multiprocessing.Pool(CORES) as pool:
        for index, image in enumerate(pool.imap(one_jpeg, range(number), 16)):
            (partial / "images" / f"{index:06d}.jpg").write_bytes(image)
            for ending, data in (("jpg", image), ("cls", str(index % 10).encode())):
                member = tarfile.TarInfo(f"{index:06d}.{ending}")
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
    partial.rename(folder)


def one_jpeg(index: int) -> bytes:
    """Return an image that depends only on its number."""
    import numpy as np
    from PIL import Image
    from sklearn.datasets import load_sample_images

    photographs = load_sample_images().images
    rng = np.random.default_rng(index)
    photograph = Image.fromarray(photographs[index % len(photographs)])
    width = int(rng.integers(120, photograph.width))
    height = min(photograph.height, width * HEIGHT // WIDTH)
    left, top = rng.integers(photograph.width - width + 1), rng.integers(photograph.height - height + 1)
    piece = photograph.resize((WIDTH, HEIGHT), Image.Resampling.BICUBIC, (left, top, left + width, top + height))
    pixels = np.asarray(piece) + rng.normal(0, NOISE, (HEIGHT, WIDTH, 1))
    buffer = io.BytesIO()
    Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(buffer, "JPEG", quality=QUALITY)
    return buffer.getvalue()


# ------------------------------------------------------------------------------------------------- the table


def table(
    rounds: dict[str, list[dict[str, float]]], options: argparse.Namespace, image_bytes: float, load: float
) -> Iterator[str]:
    """Yield the lines of the page."""
    rates = {name: [options.images / one["seconds"] for one in found] for name, found in rounds.items() if found}
    basis = statistics.median(rates["ours"]) if "ours" in rates else None
    yield "# Ingest, compared with other writers of training files"
    yield ""
    yield (
        f"`python benchmarks/ingest.py`, on {CORES} cores, {options.images:,} JPEGs of {WIDTH} x {HEIGHT} and "
        f"{image_bytes / 1e3:.0f} KB on average, {options.rounds} rounds, {setting(load)}."
    )
    yield "Images per second: median (range) of fresh processes that take turns, each after a small set."
    yield ""
    yield "| | reads | what it does with an image | images/s | our speedup | bytes written / read |"
    yield "|---|---|---|---:|---:|---:|"
    for name, found in rounds.items():
        reads, does, _ = CONTENDERS[name]
        if name not in rates:
            yield f"| {name} | {reads} | {does} | failed | | |"
            continue
        middle = statistics.median(rates[name])
        written = statistics.median(one["written"] for one in found) / (image_bytes * options.images)
        ratio = f"{basis / middle:.2f} x" if basis else ""
        yield f"| {name} | {reads} | {does} | {spread(rates[name])} | {ratio} | {written:.0%} |"


if __name__ == "__main__":
    main()
