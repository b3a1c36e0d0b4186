"""What anybody may have made, mutated: `python -m tests.support.fuzz FOLDER MUTATIONS SEED [TARGET...]` prints JSON.

A target takes bytes and may raise UserError, nothing else. While it runs, writing a file outside of FOLDER, unpickling
and starting any process but the sandbox are faults; so are an answer that takes longer than SECONDS and
more memory than MEMORY. A source is fuzzed by its examples (`tests.support.examples`).
"""

import contextlib
import gzip
import io
import itertools
import json
import os
import pickle
import random
import resource
import shutil
import signal
import struct
import sys
import tarfile
import traceback
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import h5py
import numpy as np

from ray_jobs.data.images import examine
from ray_jobs.sources.archives import arrays, containers, examples, sandboxed
from ray_jobs.sources.archives.entries import place, table
from ray_jobs.sources.vtab import pixels
from tests.support import archives, cifar, prepared, tfrecords, vtab_archives
from tests.support.arrays import VARIABLES, mat, norb
from tests.support.examples import EXAMPLES, LIBRARY, Example, read, written
from vit_model.errors import UserError

SECONDS = 10  # for one mutation
MEMORY = 3 * 2**30  # of address space, beyond what the imports take: an image may have 64 million pixels
DEEPER = 4  # members of an archive that are taken for archives again

Run = Callable[[Path, bytes], object]


class Target(NamedTuple):
    """`run` gets a new folder and a mutation of one of the seeds, after `repair` made checksums right in it."""

    seeds: Sequence[bytes]
    run: Run
    repair: Callable[[bytes], bytes] = bytes
    share: float = 1.0
    """The share of the mutations: less if one takes long."""

    def mutations(self, number: int) -> int:
        return max(1, int(number * self.share))


# ------------------------------------------------------------------------------------------------- targets


def of_image(_: Path, data: bytes) -> None:
    examine(data)


def of_archive(folder: Path, data: bytes) -> None:
    """All members are listed and read; some are opened as archives."""
    (folder / "it").write_bytes(data)
    _open(folder, {"it": str(folder / "it")}, "it", depth=2)


def _open(folder: Path, files: Mapping[str, str], file: str, depth: int) -> None:
    found, _ = containers.contents(files, file)
    for member in found:
        assert not member.path.startswith("/") and ".." not in member.path.split("/"), member
    rows = table({"key": member.path, "label": 0} | place(member) for member in found)
    for data in containers.read(files, rows):
        assert isinstance(data, bytes | UserError)
    for member in found[: DEEPER if depth else 0]:
        try:
            _open(folder, files, f"{file}::{member.path}", depth - 1)
            containers.local(files, f"{file}::{member.path}")
        except UserError:
            continue


def of_source(example: Example, mutated: str) -> Target:
    """A source with these files in its root, of which one is mutated (in its gz): listed, and its images read."""
    files = dict(example.files())
    if example.kind == "vtab":
        # the recipes are targets of their own
        example = example._replace(fields={**example.fields, "pixels": "raw"})

    def run(folder: Path, data: bytes) -> None:
        for image in read(example._replace(files=lambda: files | {mutated: data}).put(folder))[1]:
            if isinstance(image, bytes):
                with contextlib.suppress(UserError):
                    examine(image)

    seed = files[mutated]
    if seed[:2] == b"\x1f\x8b":  # behind its CRC
        return Target(
            [gzip.decompress(seed)],
            lambda folder, data: run(folder, gzip.compress(data)),
            _repair(gzip.decompress(seed)),
        )
    return Target([seed], run, _repair(seed))


def _repair(seed: bytes) -> Callable[[bytes], bytes]:
    if seed[257:262] == b"ustar":
        return checked_tar
    if seed[8:12] == tfrecords.checksum(seed[:8]):
        return checked_tfrecords
    return checked_png if seed[:4] == b"\x89PNG" else bytes


def checked_tar(data: bytes) -> bytes:
    """With right checksums in whatever looks like a header, so that what is behind them is reached."""
    blocks = bytearray(data)
    for start in range(0, len(blocks) - 511, 512):
        if blocks[start + 257 : start + 262] == b"ustar":
            blocks[start + 148 : start + 156] = b" " * 8
            blocks[start + 148 : start + 156] = b"%06o\0 " % sum(blocks[start : start + 512])
    return bytes(blocks)


def checked_png(data: bytes) -> bytes:
    """With right CRCs in its chunks."""
    out, offset = bytearray(data), 8
    while offset + 12 <= len(out):
        (length,) = struct.unpack_from(">I", out, offset)
        if offset + 12 + length > len(out):
            break
        struct.pack_into(">I", out, offset + 8 + length, zlib.crc32(out[offset + 4 : offset + 8 + length]))
        offset += 12 + length
    return bytes(out)


def checked_tfrecords(data: bytes) -> bytes:
    """With right CRCs of lengths and payloads."""
    out, offset = bytearray(data), 0
    while offset + 16 <= len(out):
        out[offset + 8 : offset + 12] = tfrecords.checksum(out[offset : offset + 8])
        (length,) = struct.unpack_from("<Q", out, offset)
        end = offset + 12 + length
        if end + 4 > len(out):
            break
        out[end : end + 4] = tfrecords.checksum(out[offset + 12 : end])
        offset = end + 4
    return bytes(out)


def checked_rar(data: bytes) -> bytes:
    """With right CRCs of its headers."""
    out, offset = bytearray(data), 7
    while offset + 11 <= len(out):
        flags, size, more = struct.unpack_from("<HHI", out, offset + 3)
        if size < 7:
            break
        struct.pack_into("<H", out, offset, zlib.crc32(out[offset + 2 : offset + size]) & 0xFFFF)
        offset += size + (more if flags & 0x8000 else 0)
    return bytes(out)


def targets() -> dict[str, Target]:
    inner = {
        "x/1.jpg": archives.image(1),
        "y/../../../../../../../tmp/vitflow-evil": b"x",
        "long/" * 50 + "name": b"y",
    }
    tars = [archives.tar(inner, form=form) for form in (tarfile.GNU_FORMAT, tarfile.PAX_FORMAT)]
    zips = [archives.zipped(inner, method) for method in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)]
    nested = archives.tar({"in.tar": tars[0], "in.tar.gz": archives.tar(inner, "w:gz"), "in.zip": zips[1]})
    forms = {
        "jpeg": [("JPEG", "RGB"), ("JPEG", "L"), ("JPEG", "CMYK")],
        "png": [("PNG", "RGB"), ("PNG", "P"), ("PNG", "RGBA")],
        "gif": [("GIF", "P")],
        "webp": [("WEBP", "RGB")],
        "tiff": [("TIFF", "RGB"), ("TIFF", "L")],
        "bmp": [("BMP", "RGB"), ("BMP", "P")],
        "avif": [("AVIF", "RGB"), ("AVIF", "L")],
    }
    return {
        **{name: Target([archives.image(3, *one) for one in kinds], of_image) for name, kinds in forms.items()},
        "png with right CRCs": Target([archives.image(3, "PNG", mode) for mode in ("RGB", "P")], of_image, checked_png),
        "tar": Target(tars, of_archive),
        "tar with right checksums": Target([*tars, nested], of_archive, checked_tar),
        "zip": Target([*zips, archives.zipped({"a.tar": tars[0], "b.gz": archives.tar(inner, "w:gz")})], of_archive),
        "gz, bz2, xz": Target([archives.tar(inner, f"w:{packed}") for packed in ("gz", "bz2", "xz")], of_archive),
        "rar with right CRCs": Target([archives.rar(inner)], of_archive, checked_rar, share=0.05),
        **of_examples(),
        **of_arrays(),
        **of_members(),
    }


def of_examples() -> dict[str, Target]:
    """Every source's example, each of its files mutated."""
    return {
        f"{example.name}, {name}": of_source(example, name)._replace(share=share)
        for example in EXAMPLES
        if example.has_root
        for name, share in example.shares().items()
    }


def inside(whole: Target, seed: bytes, packed: Callable[[bytes], bytes]) -> Target:
    """A file inside of the one that `whole` mutates, which is `packed` around it and right."""
    return Target([seed], lambda folder, data: whole.run(folder, packed(data)), _repair(seed), whole.share)


def in_zip(whole: Target, path: str) -> Target:
    with zipfile.ZipFile(io.BytesIO(whole.seeds[0])) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    return inside(whole, members[path], lambda data: archives.zipped(members | {path: data}, zipfile.ZIP_STORED))


def in_tar(whole: Target, path: str) -> Target:
    with tarfile.open(fileobj=io.BytesIO(whole.seeds[0])) as archive:
        members = {one.name: archive.extractfile(one).read() for one in archive if one.isreg()}
    return inside(whole, members[path], lambda data: archives.tar(members | {path: data}))


def of_array_records() -> Target:
    """Mutated without the zeros that fill up its blocks of 64 KiB, most of the file."""
    name, mark, size = "toy-train.array_record-00000-of-00001", b"the next block", 2**16
    splits = {"train": [2], "test": [1]}
    files = written(lambda folder: prepared.put_tfds(folder, "array_record", splits))
    blocks = [files[name][start : start + size].rstrip(b"\0") for start in range(0, len(files[name]), size)]

    def filled(data: bytes) -> bytes:
        return b"".join(block + bytes(-len(block) % size) for block in data.split(mark))

    whole = of_source(Example("array_record", {"kind": "tfds"}, lambda: files), name)
    return inside(whole, mark.join(blocks), filled)


def of_arrays() -> dict[str, Target]:
    """The parsers of arrays and records alone, of small files: there most mutations hit what is parsed."""
    x = np.arange(12, dtype=np.uint8).reshape(3, 4)
    mats = [mat(VARIABLES | {"X": x}, compress=packed) for packed in (False, True)]
    batch = {"data": x, "labels": [1, 2, 3], "batch_label": "training batch 1 of 5"}
    example = tfrecords.example({"image": [b"abc"], "label": [5, -1], "bbox": [1.0, 2.0]})
    npz, hdf5 = io.BytesIO(), [io.BytesIO() for _ in range(3)]
    np.savez_compressed(npz, x=x, y=np.asfortranarray(x))
    for data, form in zip(
        hdf5,
        ({}, {"chunks": (2, 2)}, {"chunks": (1, 4), "compression": "gzip", "shuffle": True}),
        strict=True,
    ):
        with h5py.File(data, "w") as file:
            file.create_dataset("a/x", data=x, **form)

    def of_array(name: str, shape: tuple[int | None, ...]) -> Run:
        def run(folder: Path, data: bytes) -> None:
            (folder / "it").write_bytes(data)
            np.array(arrays.read_array({"it": str(folder / "it")}, "it", name, np.integer, shape))

        return run

    def of_norb(folder: Path, data: bytes) -> None:
        (folder / "it").write_bytes(data)
        np.array(arrays.read_norb({"it": str(folder / "it")}, "it"))

    def of_example(_: Path, data: bytes) -> None:
        examples.parse_example(data)
        examples.feature_range(data, "image")

    return {
        "mat": Target(mats, of_array("X", (3, 4)), share=LIBRARY),
        "npz": Target([npz.getvalue()], of_array("x", (None, 4))),
        "hdf5": Target([data.getvalue() for data in hdf5], of_array("a/x", (None, 4)), share=LIBRARY),
        "norb": Target([norb(each) for each in (x, x.astype(np.int32))], of_norb),
        "pickle": Target(
            [cifar.python2(batch), pickle.dumps(batch, protocol=2)],
            lambda _, data: arrays.unpickle_arrays(data),
        ),
        "tfrecord": Target(
            [tfrecords.framed([example] * 3)], lambda _, data: list(examples.tfrecords(io.BytesIO(data)))
        ),
        "tf.train.Example": Target([example], of_example),
    }


def of_members() -> dict[str, Target]:
    """Files that lie inside of others, which are right around them."""
    [imagenet_1k] = [example for example in EXAMPLES if example.name == "imagenet"]
    tasks = {example.fields["task"]: example for example in EXAMPLES if example.kind == "vtab"}
    clevr, dmlab = of_source(tasks["clevr_dist"], "CLEVR_v1.0.zip"), of_source(tasks["dmlab"], "dmlab.tar.gz")
    labels = of_source(tasks["kitti"], "data_object_label_2.zip")
    devkit = of_source(tasks["kitti"], "devkit_object.zip")
    pickled = of_source(tasks["cifar"], "cifar-100-python.tar.gz")
    meta = of_source(imagenet_1k, "ILSVRC2012_devkit_t12.tar.gz")
    eye = vtab_archives.image_file(np.full((30, 40, 3), 99, np.uint8))
    clear = vtab_archives.image_file(np.full((6, 4, 4), 99, np.uint8), "PNG")
    targets = {
        "tfds, array_record": of_array_records(),
        "imagenet, meta.mat": in_tar(meta, "ILSVRC2012_devkit_t12/data/meta.mat"),
        "cifar, train": in_tar(pickled, "cifar-100-python/train"),
        "cifar, meta": in_tar(pickled, "cifar-100-python/meta"),
        "clevr_dist, scenes": in_zip(clevr, "CLEVR_v1.0/scenes/CLEVR_train_scenes.json"),
        "dmlab, records": in_tar(dmlab, "dmlab-train.tfrecord-00000-of-00002"),
        "kitti, a label": in_zip(labels, "training/label_2/000001.txt"),
        "kitti, train_rand": in_zip(devkit, "mapping/train_rand.txt"),
        "kitti, train_mapping": in_zip(devkit, "mapping/train_mapping.txt"),
        "diabetic_retinopathy, pixels": Target([eye], lambda _, data: pixels.btgraham(data)),
        "clevr, pixels": Target([clear], lambda _, data: pixels.without_alpha(data), checked_png),
    }
    shares = {"imagenet, meta.mat": LIBRARY, "diabetic_retinopathy, pixels": 0.1}
    return {name: target._replace(share=shares.get(name, target.share)) for name, target in targets.items()}


# ------------------------------------------------------------------------------------------------- mutations


def mutated(data: bytes, others: Sequence[bytes], rng: random.Random) -> bytes:
    """One to eight changes: bytes, numbers that are extreme, ranges lost, doubled, moved or from another seed."""
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 4, 8))):
        near = int((len(out) + 1) ** rng.random()) - 1  # to an end, where formats have their headers
        place = rng.choice((rng.randrange(len(out) + 1), near, len(out) - near))
        length = rng.choice((1, 2, 4, 8, 30, 512))
        match rng.randrange(8):
            case 0:
                out[place : place + 1] = bytes([rng.randrange(256)])
            case 1:
                if place < len(out):
                    out[place] ^= 1 << rng.randrange(8)
            case 2:
                number = rng.choice((0, 1, 255, 2**15, 2**16 - 1, 2**31 - 1, 2**32 - 1, 2**63 - 1, 2**64 - 1))
                size = rng.choice([size for size in (1, 2, 4, 8) if number < 256**size])
                out[place : place + size] = number.to_bytes(size, rng.choice(("little", "big")))
            case 3:
                del out[place : place + length]
            case 4:
                out[place:place] = out[place : place + length]
            case 5:
                del out[place:]
            case 6:
                digits = rng.choice((b"77777777777", b"-0000000001", b"00000000000", b"\x80" + b"\xff" * 10))
                out[place : place + 11] = digits
            case 7:
                other = rng.choice(others)
                start = rng.randrange(len(other))
                out[place : place + length] = other[start : start + length]
    return bytes(out)


# ------------------------------------------------------------------------------------------------- the run


class Fault(BaseException):
    """Something that a target must never do; no `except Exception` hides it."""


class Guard:
    """Sees every file that is opened to be written, every process, every unpickling."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.on = str(folder), False
        self.faults: list[str] = []
        sys.addaudithook(self.see)

    def see(self, event: str, given: tuple[Any, ...]) -> None:
        if not self.on:
            return
        writes = event == "open" and isinstance(given[2], int) and given[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        if (writes or event in {"os.rename", "os.link", "os.symlink", "os.mkdir", "os.remove"}) and not (
            isinstance(given[0], str | Path) and self.allowed(str(given[0]))
        ):
            self.faults.append(f"{event} {given[0]!r}")
        elif event in {"pickle.find_class", "os.system", "os.exec"}:
            self.faults.append(f"{event} {given!r}")
        elif event == "subprocess.Popen" and sandboxed.__file__ not in given[1]:
            self.faults.append(f"{event} {given[1]!r}")

    def allowed(self, path: str) -> bool:
        return path == "/dev/null" or os.path.realpath(path).startswith(self.folder + "/")


def _late(*_: object) -> None:
    raise Fault(f"no answer in {SECONDS} s")


def fuzz(folder: Path, number: int, seed: int, names: Sequence[str]) -> dict[str, Any]:
    """Runs of each target: how many ended well and how many with UserError; and faults, with where the bytes are."""
    known = targets()
    signal.signal(signal.SIGALRM, _late)
    for name in names or known:  # what is imported late is imported now
        for data in known[name].seeds:
            assert _outcome(None, folder, known[name], data) == "read", f"{name}: a seed that is no right file"
    guard = Guard(folder)
    before = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (before + MEMORY, resource.getrlimit(resource.RLIMIT_AS)[1]))
    counts: dict[str, Counter[str]] = {}
    faults: list[str] = []
    for name in names or known:
        target, rng, counts[name] = known[name], random.Random(f"{seed}/{name}"), Counter()
        for _ in range(target.mutations(number)):
            data = target.repair(mutated(rng.choice(target.seeds), target.seeds, rng))
            (folder / "last").write_bytes(data)  # what a crash of the process leaves
            counts[name][outcome := _outcome(guard, folder, target, data)] += 1
            if outcome not in ("read", "UserError"):
                kept = folder / f"fault-{len(faults)}"
                kept.write_bytes(data)
                faults.append(f"{name}, {kept}: {outcome}")
    return {
        "counts": counts,
        "faults": faults,
        # (ru_maxrss would begin with the peak of the process that started this one.)
        "peak_mib": int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) >> 10,
    }


def _outcome(guard: Guard | None, folder: Path, target: Target, data: bytes) -> str:
    """ "read", "UserError", or what went wrong."""
    work = folder / f"work-{next(_number)}"  # a new name, as files are known by their names and times
    work.mkdir()
    signal.alarm(SECONDS if guard else 6 * SECONDS)  # a seed is read with the imports
    if guard:
        guard.on = True
    try:
        target.run(work, data)
        outcome = "read"
    except UserError:
        outcome = "UserError"
    except (Exception, Fault):
        outcome = traceback.format_exc(limit=-4)
    finally:
        signal.alarm(0)
        if guard:
            guard.on = False
            outcome, guard.faults = "; ".join(guard.faults) or outcome, []
    shutil.rmtree(work)
    shutil.rmtree(folder / "cache", ignore_errors=True)
    return outcome


_number = itertools.count()


if __name__ == "__main__":
    given = Path(sys.argv[1]).resolve()
    os.fsync = lambda _: None  # most of the time, for files that live as long as one mutation
    os.environ |= {"XDG_CACHE_HOME": str(given / "cache"), "TMPDIR": str(given), "HOME": str(given)}
    print(json.dumps(fuzz(given, int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:]), indent=1))
