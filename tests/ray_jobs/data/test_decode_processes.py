"""Decoding in processes: the same batches, reports and errors as with threads; no process outlives the training."""

import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import replace
from io import BytesIO
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from PIL import Image

from pipelines.store import open_store
from ray_jobs.augment import RandomCrop
from ray_jobs.data.columns import Sample
from ray_jobs.data.loader import Loader
from ray_jobs.data.sampler import Sampler
from ray_jobs.data.shards import Dataset, Images, open_artifact, open_dataset
from tests.support import datasets
from tests.support.records import make_manifest
from tests.support.s3 import Server, used
from tests.support.serving import serving
from vit_model.contract import Preprocessing

pytestmark = pytest.mark.slow  # each start of the processes imports torch

N = 40
PREPROCESSING = Preprocessing(mean=(0.5,) * 3, std=(0.5,) * 3, resolution=24, channels=3)


@pytest.fixture
def dataset(tmp_path: Path) -> Dataset:
    """40 JPEGs in eight shards."""
    rng, samples = np.random.default_rng(0), []
    for name in datasets.identities(N):
        file = BytesIO()
        small = Image.fromarray(rng.integers(0, 256, (4, 5, 3), np.uint8))
        small.resize((40, 30), Image.Resampling.BICUBIC).save(file, "JPEG")
        samples.append(Sample(name, name, file.getvalue(), "jpeg", 40, 30, 3, 0))
    datasets.put(tmp_path / "data", "files", ["a"], None, {"train": samples}, per_shard=5, row_group_bytes=8000)
    return open_dataset(tmp_path / "data")


def make_loader(data: Dataset, in_processes: bool = True) -> Loader:
    images = Images(data, data.index("train"))
    sampler, crop = Sampler(images, seed=0, batch_size=10), RandomCrop("crop_flip", 0)
    return Loader(images, sampler, PREPROCESSING, crop=crop, threads=3, in_processes=in_processes)


def taken(loader: Loader, count: int) -> list[tuple[list[int], bytes]]:
    """The positions and pixels of the next batches."""
    return [(batch.positions.tolist(), batch.images.numpy().tobytes()) for batch in islice(loader, count)]


def helpers() -> list[psutil.Process]:
    """The processes that this one has started to decode."""
    return [child for child in psutil.Process().children() if "ray_jobs.data.decode_processes" in child.cmdline()]


def test_processes_deliver_what_threads_do(dataset: Dataset, capsys: pytest.CaptureFixture[str]) -> None:
    """Also with damage, and after the loader goes back to an earlier state while the processes decode."""
    datasets.damage(dataset, (7, 30, 31))
    with make_loader(dataset, in_processes=False) as loader:
        expected = taken(loader, 12)
    on_threads = capsys.readouterr().out
    with make_loader(dataset) as loader:
        start = loader.state_dict()
        taken(loader, 2)
        loader.load_state_dict(start)
        assert taken(loader, 12) == expected
        assert loader.metrics()["substitutes"] >= 3 * 3, "three epochs"
    assert on_threads.count("has other bytes than at ingest") == 3
    assert sorted(capsys.readouterr().out.splitlines()) == sorted(on_threads.splitlines()), "each is told once"
    assert not helpers()


def test_an_error_of_a_process_is_the_loaders(dataset: Dataset) -> None:
    (dataset.folder / dataset.info.shards[1].file).unlink()
    with (
        make_loader(dataset) as loader,
        pytest.raises(ValueError, match=r"00001\.parquet is missing or damaged"),
    ):
        taken(loader, 5)


def test_a_killed_process_ends_the_training(dataset: Dataset) -> None:
    with make_loader(dataset) as loader:
        taken(loader, 1)
        (helper,) = helpers()
        helper.children()[1].kill()
        with pytest.raises(RuntimeError, match="a process that decodes images ended unexpectedly"):
            taken(loader, 10)
    assert not helper.is_running()


def test_nothing_outlives_a_killed_training(dataset: Dataset) -> None:
    program = (
        "import sys, time; from pathlib import Path;"
        "from ray_jobs.data.shards import open_dataset;"
        "from tests.ray_jobs.data.test_decode_processes import helpers, make_loader, taken;"
        "taken(make_loader(open_dataset(Path(sys.argv[1]))), 1);"
        "(helper,) = helpers(); print(helper.pid, *(child.pid for child in helper.children()), flush=True);"
        "time.sleep(600)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, dataset.folder], stdout=subprocess.PIPE, text=True
    ) as training:
        assert training.stdout is not None
        processes = [psutil.Process(int(pid)) for pid in training.stdout.readline().split()]
        assert len(processes) == 4
        training.send_signal(signal.SIGKILL)
    assert not psutil.wait_procs(processes, timeout=60)[1]


def test_each_shard_is_fetched_from_s3_once(
    dataset: Dataset, moto: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with make_loader(dataset, in_processes=False) as loader:
        expected = taken(loader, 8)
    bucket, fetched = moto.bucket().name, []

    def late(environ: dict[str, Any], start: Any) -> Iterable[bytes]:
        """Answer when the processes already wait for work, but before the client's timeout."""
        if environ["REQUEST_METHOD"] == "GET" and "shards/" in environ["PATH_INFO"]:
            fetched.append(environ["PATH_INFO"])
            end = time.monotonic() + 10
            while time.monotonic() < end and len([pid for each in helpers() for pid in each.children()]) < 3:
                time.sleep(0.05)
            time.sleep(0.5)
        return moto.application(environ, start)

    with serving(late) as endpoint, used(replace(moto, endpoint=endpoint), monkeypatch):
        store = open_store(f"s3://{bucket}/store")
        with store.staging(make_manifest().folder) as staging:
            shutil.copytree(dataset.folder, staging.path, dirs_exist_ok=True)
        with make_loader(open_artifact(store, make_manifest(files=staging.files))) as loader:
            assert taken(loader, 8) == expected
    assert sorted(fetched) == sorted(set(fetched))
    assert len(fetched) == len(dataset.info.shards) == 8
