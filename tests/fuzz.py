"""What anybody may have made, mutated: `python -m tests.fuzz FOLDER MUTATIONS SEED [TARGET...]` prints JSON.

A target takes bytes and may raise ValueError, nothing else. While it runs, writing a file outside of FOLDER, unpickling
and starting any process but the one that unpacks RARs are faults; so are an answer that takes longer than SECONDS and
more memory than MEMORY. Another source is one more line in `targets`: `of_source(its fields, its files, which one)`.
"""

import gzip
import itertools
import json
import os
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

from pydantic import TypeAdapter

from pipelines.spec import Source
from ray_jobs.images import examine
from ray_jobs.sources import catalog, containers, rar
from ray_jobs.sources.entries import place, table
from tests import archives, imagenet

SECONDS = 10  # for one mutation
MEMORY = 3 * 2**30  # of address space, beyond what the imports take: an image may have 64 million pixels
DEEPER = 4  # members of an archive that are taken for archives again

Run = Callable[[Path, bytes], None]


class Target(NamedTuple):
    """`run` gets a new folder and a mutation of one of the seeds, after `repair` made checksums right in it."""

    seeds: Sequence[bytes]
    run: Run
    repair: Callable[[bytes], bytes] = bytes
    share: float = 1.0
    """Of the mutations: less where one takes long."""


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
        assert isinstance(data, bytes | ValueError)
    for member in found[: DEEPER if depth else 0]:
        try:
            _open(folder, files, f"{file}::{member.path}", depth - 1)
            containers.local(files, f"{file}::{member.path}")
        except ValueError:
            continue


def of_source(fields: Mapping[str, Any], files: Mapping[str, bytes], mutated: str) -> Target:
    """A source with these files in its root, of which one is mutated (in its gz): listed, and its images read."""

    def run(folder: Path, data: bytes) -> None:
        for name, content in (files | {mutated: data}).items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content)
        source = TypeAdapter[Any](Source).validate_python(fields | {"root": str(folder)})
        given = {name: str(path) for name, path in source.files()}
        listing = catalog.listing(source, given)
        for data in catalog.images(source, given, listing.entries):
            if isinstance(data, bytes):
                try:
                    examine(data)
                except ValueError:
                    continue

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
    images = {f"{label}/{i}.png": archives.image(i, "PNG") for label in "ab" for i in range(3)}
    inner = {
        "x/1.jpg": archives.image(1),
        "y/../../../../../../../tmp/vitflow-evil": b"x",
        "long/" * 50 + "name": b"y",
    }
    tars = [archives.tar(inner, form=form) for form in (tarfile.GNU_FORMAT, tarfile.PAX_FORMAT)]
    zips = [archives.zipped(inner, method) for method in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)]
    nested = archives.tar({"in.tar": tars[0], "in.tar.gz": archives.tar(inner, "w:gz"), "in.zip": zips[1]})
    samples = {f"{i}.{field}": data for i in range(3) for field, data in
               (("jpg", archives.image(i)), ("cls", b"%d" % (i % 2)), ("json", b'{"label": 1}'))}  # fmt: skip
    forms = {
        "jpeg": [("JPEG", "RGB"), ("JPEG", "L"), ("JPEG", "CMYK")],
        "png": [("PNG", "RGB"), ("PNG", "P"), ("PNG", "RGBA")],
        "gif": [("GIF", "P")],
        "webp": [("WEBP", "RGB")],
        "tiff": [("TIFF", "RGB"), ("TIFF", "L")],
        "bmp": [("BMP", "RGB"), ("BMP", "P")],
    }
    devkit = imagenet.files(images=2)
    return {
        **{
            name: Target([archives.image(3, *one) for one in kinds], of_image)
            for name, kinds in forms.items()
        },
        "png with right CRCs": Target(
            [archives.image(3, "PNG", mode) for mode in ("RGB", "P")], of_image, checked_png
        ),
        "tar": Target(tars, of_archive),
        "tar with right checksums": Target([*tars, nested], of_archive, checked_tar),
        "zip": Target(
            [*zips, archives.zipped({"a.tar": tars[0], "b.gz": archives.tar(inner, "w:gz")})], of_archive
        ),
        "gz, bz2, xz": Target(
            [archives.tar(inner, f"w:{packed}") for packed in ("gz", "bz2", "xz")], of_archive
        ),
        "rar with right CRCs": Target([archives.rar(inner)], of_archive, checked_rar, share=0.05),
        "folder": of_source({"kind": "folder"}, images, "a/1.png"),
        "webdataset": of_source({"kind": "webdataset"}, {"x.tar": archives.tar(samples)}, "x.tar"),
        "webdataset, JSON": of_source(
            {"kind": "webdataset", "label": "json.label", "class_names": ("x", "y")},
            {"x.tar": archives.tar(samples)},
            "x.tar",
        ),
        **{f"imagenet, {name}": of_source({"kind": "imagenet"}, devkit, name) for name in devkit},
        "imagenet, meta.mat": imagenet_with_meta(devkit),
    }


def imagenet_with_meta(files: Mapping[str, bytes]) -> Target:
    """The devkit's MATLAB file, mutated inside of a devkit that is right."""
    name = "ILSVRC2012_devkit_t12.tar.gz"

    whole = of_source({"kind": "imagenet"}, files, name)

    def run(folder: Path, data: bytes) -> None:
        whole.run(folder, gzip.decompress(imagenet.devkit(data)))

    return Target([imagenet.meta()], run)


# ------------------------------------------------------------------------------------------------- mutations


def mutated(data: bytes, others: Sequence[bytes], rng: random.Random) -> bytes:
    """One to eight changes: bytes, numbers that are extreme, ranges lost, doubled, moved or from another seed."""
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 4, 8))):
        place, length = rng.randrange(len(out) + 1), rng.choice((1, 2, 4, 8, 30, 512))
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
        writes = (
            event == "open"
            and isinstance(given[2], int)
            and given[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        )
        if (writes or event in {"os.rename", "os.link", "os.symlink", "os.mkdir", "os.remove"}) and not (
            isinstance(given[0], str | Path) and self.allowed(str(given[0]))
        ):
            self.faults.append(f"{event} {given[0]!r}")
        elif event in {"pickle.find_class", "os.system", "os.exec"}:
            self.faults.append(f"{event} {given!r}")
        elif event == "subprocess.Popen" and rar.__file__ not in given[1]:
            self.faults.append(f"{event} {given[1]!r}")

    def allowed(self, path: str) -> bool:
        return path == "/dev/null" or os.path.realpath(path).startswith(self.folder + "/")


def _late(*_: object) -> None:
    raise Fault(f"no answer in {SECONDS} s")


def fuzz(folder: Path, number: int, seed: int, names: Sequence[str]) -> dict[str, Any]:
    """Runs of each target: how many ended well and how many with ValueError; and faults, with where the bytes are."""
    known = targets()
    signal.signal(signal.SIGALRM, _late)
    for name in names or known:  # what is imported late is imported now
        for data in known[name].seeds:
            assert _outcome(None, folder, known[name], data) == "read", (
                f"{name}: a seed that is no right file"
            )
    guard = Guard(folder)
    before = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (before + MEMORY, resource.getrlimit(resource.RLIMIT_AS)[1]))
    counts: dict[str, Counter[str]] = {}
    faults: list[str] = []
    for name in names or known:
        target, rng, counts[name] = known[name], random.Random(f"{seed}/{name}"), Counter()
        for _ in range(max(1, int(number * target.share))):
            data = target.repair(mutated(rng.choice(target.seeds), target.seeds, rng))
            (folder / "last").write_bytes(data)  # what a crash of the process leaves
            counts[name][outcome := _outcome(guard, folder, target, data)] += 1
            if outcome not in ("read", "ValueError"):
                kept = folder / f"fault-{len(faults)}"
                kept.write_bytes(data)
                faults.append(f"{name}, {kept}: {outcome}")
    return {
        "counts": counts,
        "faults": faults,
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10,
    }


def _outcome(guard: Guard | None, folder: Path, target: Target, data: bytes) -> str:
    """ "read", "ValueError", or what went wrong."""
    work = folder / f"work-{next(_number)}"  # a new name, as files are known by their names and times
    work.mkdir()
    signal.alarm(SECONDS)
    if guard:
        guard.on = True
    try:
        target.run(work, data)
        outcome = "read"
    except ValueError:
        outcome = "ValueError"
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
    os.environ |= {"XDG_CACHE_HOME": str(given / "cache"), "TMPDIR": str(given), "HOME": str(given)}
    print(json.dumps(fuzz(given, int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:]), indent=1))
