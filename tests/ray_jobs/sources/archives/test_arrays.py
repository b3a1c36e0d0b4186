"""Array files: what their own libraries wrote is read as it was, and nothing else comes out of hostile ones."""

import io
import os
import pickle
import struct
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pytest
import scipy

from ray_jobs.sources.archives.arrays import (
    hdf5_array,
    hdf5_rows,
    hdf5_slice,
    read_mat,
    read_norb,
    read_npz,
    unpickle_arrays,
)
from tests.support.archives import zipped
from tests.support.arrays import VARIABLES, mat, norb

RNG = np.random.default_rng(0)


@pytest.mark.parametrize("compress", [False, True])
def test_a_mat_file_gives_what_scipy_gives(compress: bool) -> None:
    data = mat(VARIABLES, compress=compress)
    expected = scipy.io.loadmat(io.BytesIO(data))
    found = read_mat(data)
    assert set(found) == set(VARIABLES)
    for name in VARIABLES:
        assert repr(found[name]) == repr(expected[name])
        assert found[name].dtype == expected[name].dtype
    assert found["synsets"]["WNID"][0, 1][0] == "n02100735"
    np.testing.assert_array_equal(found["X"], VARIABLES["X"])


def test_a_mat_file_that_claims_more_than_it_holds_is_refused_before_it_is_allocated() -> None:
    data = mat({"cells": np.array([1.0, 2.0], dtype=object)}, compress=False)
    claimed = data.replace(struct.pack("<ii", 1, 2), struct.pack("<ii", 1, 2**30), 1)
    assert claimed != data
    with pytest.raises(ValueError, match="cells, got 2"):
        read_mat(claimed)
    with pytest.raises(ValueError, match=r"not a MATLAB v5"):
        read_mat(b"\x55\x4c\x3d\x1e" + bytes(200))


@pytest.mark.parametrize(
    "array",
    [
        RNG.integers(0, 256, (3, 2, 4, 4), np.uint8),
        np.arange(5, dtype=np.int32),
        np.arange(20, dtype=np.int32).reshape(5, 4),
    ],
)
def test_norb_matrices(array: np.ndarray) -> None:
    found = read_norb(norb(array))
    assert found.dtype == array.dtype
    np.testing.assert_array_equal(found, array)
    with pytest.raises(ValueError, match="its header says"):
        read_norb(norb(array)[:-1])


def test_npz(tmp_path: Path) -> None:
    path = tmp_path / "dsprites.npz"
    images, classes = RNG.integers(0, 2, (6, 4, 4), np.uint8), np.asfortranarray(np.arange(12).reshape(6, 2))
    np.savez_compressed(
        path, imgs=images, latents_classes=classes, metadata=np.array([{"a": 1}], dtype=object)
    )
    found = read_npz(path, ["imgs", "latents_classes"])
    np.testing.assert_array_equal(found["imgs"], images)
    np.testing.assert_array_equal(found["latents_classes"], classes)
    with pytest.raises(ValueError, match="metadata contains Python objects"):
        read_npz(path, ["metadata"])
    with pytest.raises(ValueError, match="missing array"):
        read_npz(path, ["labels"])


def test_an_npy_header_that_claims_more_than_its_member_has_is_refused(tmp_path: Path) -> None:
    member = io.BytesIO()
    np.lib.format.write_array_header_1_0(member, {"descr": "|u1", "fortran_order": False, "shape": (2**40,)})
    with zipfile.ZipFile(tmp_path / "bomb.npz", "w") as archive:
        archive.writestr("imgs.npy", member.getvalue() + b"abc")
    with pytest.raises(ValueError, match="which is not its size"):
        read_npz(tmp_path / "bomb.npz", ["imgs"])


def npy(header: bytes, version: int = 1) -> bytes:
    return b"\x93NUMPY" + bytes([version, 0]) + len(header).to_bytes(2 * version, "little") + header + b"abc"


@pytest.mark.parametrize(
    ("member", "method", "message"),
    [
        # what numpy's parser lets through: TokenError, IndentationError, MemoryError
        (npy(b"{'descr': '|u1', 'fortran_order': False, 'shape': M3,), }"), zipfile.ZIP_STORED, "header"),
        (npy(b"if 1:\n    a\n  b"), zipfile.ZIP_STORED, "header"),
        (npy(b"-" * 9000 + b"1"), zipfile.ZIP_STORED, "header"),
        (npy(b"{'descr': '|u1', 'fortran_order': False, 'shape': (3,)}", 2), zipfile.ZIP_STORED, "version"),
        (npy(b"{'descr': '|u1', 'fortran_order': False, 'shape': (3,)}"), zipfile.ZIP_LZMA, "by method 14"),
    ],
)
def test_an_npy_that_numpy_would_not_have_written_is_refused(
    member: bytes, method: int, message: str, tmp_path: Path
) -> None:
    (tmp_path / "x.npz").write_bytes(zipped({"imgs.npy": member}, method))
    with pytest.raises(ValueError, match=message):
        read_npz(tmp_path / "x.npz", ["imgs"])


# ------------------------------------------------------------------------------------------------- HDF5


@pytest.fixture
def hdf5(tmp_path: Path) -> Path:
    path = tmp_path / "x.h5"
    with h5py.File(tmp_path / "other.h5", "w") as other:
        other["x"] = np.zeros((4, 2), np.uint8)
    with h5py.File(path, "w") as file:
        file.create_dataset("x", data=np.arange(32, dtype=np.uint8).reshape(4, 2, 4), compression="gzip")
        file["latents/classes"] = np.arange(8).reshape(4, 2)
        file["outside"] = h5py.ExternalLink("other.h5", "/x")
        file["folder"] = h5py.ExternalLink("other.h5", "/")
        file["soft"] = h5py.SoftLink("/x")
        file.create_dataset("bomb", (2**40,), "u1", chunks=(2**20,), compression="gzip")
        file.create_dataset("raw", (4,), "u1", external=[(os.fspath(tmp_path / "secret"), 0, 4)])
        virtual = h5py.VirtualLayout((4, 2), "u1")
        virtual[:] = h5py.VirtualSource(os.fspath(tmp_path / "other.h5"), "x", (4, 2))
        file.create_virtual_dataset("virtual", virtual)
    return path


def test_hdf5_arrays_are_read_in_slices(hdf5: Path) -> None:
    found = hdf5_array(hdf5, "x", "u1", (None, 2, 4))
    np.testing.assert_array_equal(found[1:3], np.arange(32).reshape(4, 2, 4)[1:3])
    np.testing.assert_array_equal(
        hdf5_array(hdf5, "latents/classes", "i8", (4, None))[:], np.arange(8).reshape(4, 2)
    )


@pytest.mark.slow
def test_a_file_that_keeps_the_hdf5_library_busy_ends_the_process(tmp_path: Path) -> None:
    """No damaged file that hangs it is known, so that a pipe that nobody writes stands for one."""
    os.mkfifo(tmp_path / "x.h5")
    code = (
        "import sys, pathlib; from ray_jobs.sources.archives import arrays; arrays.SECONDS = 1;"
        " arrays.open_hdf5(pathlib.Path(sys.argv[1]))"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code, tmp_path / "x.h5"], capture_output=True, text=True, timeout=60
    )
    assert ended.returncode == 1
    assert ended.stderr.startswith("Timeout") and "in open_hdf5" in ended.stderr


@pytest.mark.parametrize("chunks", [None, (1, 2, 2), (4, 2, 2), (14, 1, 1)])
def test_hdf5_rows_come_in_the_order_asked_for(tmp_path: Path, chunks: tuple[int, ...] | None) -> None:
    values = np.random.default_rng(0).integers(0, 256, (14, 2, 4), np.uint8)
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file.create_dataset("x", data=values, chunks=chunks)
        file.create_dataset("y", data=values.astype("i2"))
    array = hdf5_array(tmp_path / "x.h5", "x", None, (14, 2, 4))
    for numbers in ([3, 13, 0, 7, 8, 8], [], list(range(14))):
        np.testing.assert_array_equal(hdf5_rows(array, numbers), values[numbers])
    assert hdf5_array(tmp_path / "x.h5", "y", None, (14, 2, 4)).dtype == np.int16


def test_damage_inside_of_hdf5_is_a_value_error(tmp_path: Path) -> None:
    values = np.random.default_rng(0).integers(0, 256, (64, 8, 8), np.uint8)
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file.create_dataset("x", data=values, chunks=(8, 8, 8), fletcher32=True)
    data = bytearray((tmp_path / "x.h5").read_bytes())
    data[data.index(values[40].tobytes()[:16])] ^= 1
    (tmp_path / "x.h5").write_bytes(data)
    array = hdf5_array(tmp_path / "x.h5", "x", "u1", (64, 8, 8))
    np.testing.assert_array_equal(hdf5_slice(array, 3), values[3])
    with pytest.raises(ValueError, match=r"x\.h5: /x is damaged"):
        hdf5_rows(array, [3, 41])


@pytest.mark.parametrize(
    ("name", "dtype", "shape", "message"),
    [
        ("y", "u1", (None,), "y is missing"),
        ("latents", "u1", (None,), "is not an array"),
        ("outside", "u1", (4, 2), "is a link"),
        ("folder/x", "u1", (4, 2), "is a link"),
        ("soft", "u1", (4, 2, 4), "is a link"),
        ("x", "f4", (None, 2, 4), "is uint8"),
        ("x", "u1", (None, 3, 4), "not"),
        ("bomb", "u1", (None,), "claims 1099511627776 bytes"),
        ("raw", "u1", (4,), "in another file"),
        ("virtual", "u1", (4, 2), "in another file"),
    ],
)
def test_hdf5_that_is_not_plain_data_is_refused(
    hdf5: Path, name: str, dtype: str, shape: tuple[int | None, ...], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        hdf5_array(hdf5, name, dtype, shape)


# ------------------------------------------------------------------------------------------------- pickles


def python2_text(text: bytes) -> bytes:
    return b"U" + bytes([len(text)]) + text


def python2_batch(data: np.ndarray, labels: list[int]) -> bytes:
    """{"data": array, "labels": list, "batch_label": text} as Python 2's cPickle writes it with protocol 2."""
    n, width = data.shape
    array = (
        b"cnumpy.core.multiarray\n_reconstruct\nq\x02cnumpy\nndarray\nq\x03K\x00\x85q\x04"
        + python2_text(b"b")
        + b"\x87q\x05Rq\x06(K\x01"
        + b"M"
        + struct.pack("<H", n)
        + b"M"
        + struct.pack("<H", width)
        + b"\x86q\x07"
        + b"cnumpy\ndtype\nq\x08"
        + python2_text(b"u1")
        + b"K\x00K\x01\x87q\x09Rq\x0a(K\x03"
        + python2_text(b"|")
        + b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tq\x0bb\x89"
        + b"T"
        + struct.pack("<i", data.size)
        + data.tobytes()
        + b"tq\x0cb"
    )
    numbers = b"]q\x0d(" + b"".join(b"K" + bytes([label]) for label in labels) + b"e"
    return (
        b"\x80\x02}q\x01("
        + python2_text(b"data")
        + array
        + python2_text(b"labels")
        + numbers
        + python2_text(b"batch_label")
        + python2_text(b"training batch 1 of 5")
        + b"u."
    )


BATCH = RNG.integers(0, 256, (4, 3072), np.uint8)


def test_a_python_2_pickle_is_read_as_a_general_unpickler_reads_it() -> None:
    data = python2_batch(BATCH, [6, 9, 9, 4])
    found, expected = unpickle_arrays(data), pickle.loads(data, encoding="latin1")
    assert isinstance(found, dict)
    np.testing.assert_array_equal(found.pop("data"), expected.pop("data"))
    assert found == expected == {"labels": [6, 9, 9, 4], "batch_label": "training batch 1 of 5"}


@pytest.mark.parametrize("array", [BATCH, np.asfortranarray(np.arange(6.0).reshape(2, 3)), np.arange(3)])
def test_a_python_3_pickle_of_protocol_2_is_read(array: np.ndarray) -> None:
    found = unpickle_arrays(pickle.dumps({"fine_labels": [1], "data": array}, protocol=2))
    assert isinstance(found, dict)
    assert found["data"].dtype == array.dtype
    np.testing.assert_array_equal(found["data"], array)


class Evil:
    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, ("touch pwned",)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (pickle.dumps({"data": Evil()}, protocol=2), "refers to posix.system"),
        (pickle.dumps({"data": Evil()}), "opcode"),
        (b"cbuiltins\neval\n(S'1'\ntR.", "refers to builtins.eval"),
        (b"\x80\x02Nr\xff\xff\xff\x7f.", "more references than bytes"),
        # numpy itself would fill an array of objects with pointers out of the bytes
        (pickle.dumps({"data": BATCH}, protocol=2).replace(b"u1", b"O8"), "array type O8"),
        (pickle.dumps({"data": BATCH}, protocol=2).replace(b"u1", b"u8"), "damaged"),
    ],
)
def test_a_pickle_of_anything_else_is_refused_and_runs_nothing(
    data: bytes, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=message):
        unpickle_arrays(data)
    assert not list(tmp_path.iterdir())
