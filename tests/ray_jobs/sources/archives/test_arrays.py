"""Array files: what their own libraries wrote is read as it was, and nothing else comes out of hostile ones."""

import os
import pickle
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pytest
import scipy

from ray_jobs.sources.archives import sandbox, sandboxed
from ray_jobs.sources.archives.arrays import read_array, read_norb, unpickle_arrays
from tests.support import cifar
from tests.support.archives import zipped
from tests.support.arrays import VARIABLES, mat, norb
from vit_model.errors import UserError

RNG = np.random.default_rng(0)


def array(path: Path, name: str, dtype: type, *shape: int | None) -> np.ndarray:
    return read_array({path.name: str(path)}, path.name, name, dtype, shape)


@pytest.mark.parametrize("compress", [False, True])
def test_a_mat_file_gives_what_scipy_gives(compress: bool, tmp_path: Path) -> None:
    path = tmp_path / "x.mat"
    path.write_bytes(mat(VARIABLES, compress=compress))
    expected = scipy.io.loadmat(path)
    for name in ("X", "y", "labels", "empty", "text", "words", "one"):
        found = array(path, name, np.generic, *expected[name].shape)
        assert repr(np.asarray(found)) == repr(expected[name]) and found.dtype == expected[name].dtype
    synsets = array(path, "synsets", np.void, 2)
    assert synsets["WNID"].tolist() == ["n02119789", "n02100735"] and synsets["num_children"].sum() == 0
    for name, message in (("cells", "is not an array of real"), ("other", "does not contain other")):
        with pytest.raises(UserError, match=rf"^x\.mat .*{message}"):
            array(path, name, np.generic, None)


def test_a_mat_file_that_claims_more_than_it_holds_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.mat"
    data = mat({"cells": np.array([1.0, 2.0], dtype=object)}, compress=False)
    path.write_bytes(data.replace(struct.pack("<ii", 1, 2), struct.pack("<ii", 1, 2**30), 1))
    with pytest.raises(UserError, match=r"^x\.mat (is|needs) .*(damaged|memory)"):
        array(path, "cells", np.generic, None)
    path.write_bytes(b"\x55\x4c\x3d\x1e" + bytes(200))
    with pytest.raises(UserError, match=r"^x\.mat is not an npz, HDF5 or MATLAB v5 file"):
        array(path, "cells", np.generic, None)


@pytest.mark.parametrize(
    "values",
    [
        RNG.integers(0, 256, (3, 2, 4, 4), np.uint8),
        np.arange(5, dtype=np.int32),
        np.arange(20, dtype=np.int32).reshape(5, 4),
    ],
)
def test_norb_matrices(values: np.ndarray, tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(norb(values))
    found = read_norb({"x": str(path)}, "x")
    assert found.dtype == values.dtype
    np.testing.assert_array_equal(found, values)
    path.write_bytes(norb(values)[:-1])
    with pytest.raises(UserError, match="x: its header says"):
        read_norb({"x": str(path)}, "x")


def test_npz(tmp_path: Path) -> None:
    path = tmp_path / "dsprites.npz"
    images, classes = RNG.integers(0, 2, (6, 4, 4), np.uint8), np.asfortranarray(np.arange(12).reshape(6, 2))
    np.savez_compressed(path, imgs=images, classes=classes, metadata=np.array([{"a": 1}], dtype=object))
    np.testing.assert_array_equal(array(path, "imgs", np.uint8, None, 4, 4), images)
    np.testing.assert_array_equal(array(path, "classes", np.integer, 6, None), classes)
    for name, dtype, shape, message in (
        ("metadata", np.generic, (1,), "metadata contains Python objects"),
        ("labels", np.generic, (None,), r"does not contain 'labels\.npy'"),
        ("imgs", np.uint8, (None, 4), r"imgs is uint8 \(6, 4, 4\); expected uint8 \(None, 4\)"),
        ("imgs", np.floating, (None, 4, 4), "imgs is uint8 .*; expected floating"),
    ):
        with pytest.raises(UserError, match=message):
            array(path, name, dtype, *shape)


def test_an_npz_is_compared_with_its_checksum(tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", x=np.arange(100, dtype=np.uint8))
    data = (tmp_path / "x.npz").read_bytes()
    (tmp_path / "x.npz").write_bytes(data.replace(bytes(range(50, 60)), bytes(range(51, 61))))
    with pytest.raises(UserError, match="the checksum"):
        array(tmp_path / "x.npz", "x", np.uint8, None)


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
        (npy(b"{'descr': '|u1', 'fortran_order': False, 'shape': (2**40,)}"), zipfile.ZIP_STORED, "header"),
        (
            npy(b"{'descr': '|u1', 'fortran_order': False, 'shape': (-1, -3)}"),
            zipfile.ZIP_STORED,
            "header says .*, but it has 3 bytes",
        ),
        (
            npy(b"{'descr': '|u1', 'fortran_order': False, 'shape': (99999999,)}"),
            zipfile.ZIP_STORED,
            "header says .*, but it has 3 bytes",
        ),
        (
            npy(b"{'descr': '|V0', 'fortran_order': False, 'shape': (9,)}"),
            zipfile.ZIP_STORED,
            "header says .*, but it has 3 bytes",
        ),
        (
            npy(b"{'descr': '|u1', 'fortran_order': False, 'shape': (3,)}"),
            zipfile.ZIP_LZMA,
            "does not contain",
        ),
    ],
)
def test_an_npy_that_numpy_would_not_have_written_is_refused(
    member: bytes, method: int, message: str, tmp_path: Path
) -> None:
    (tmp_path / "x.npz").write_bytes(zipped({"imgs.npy": member}, method))
    with pytest.raises(UserError, match=message):
        array(tmp_path / "x.npz", "imgs", np.uint8, 3)


# ------------------------------------------------------------------------------------------------- HDF5


@pytest.mark.parametrize("chunks", [None, (1, 2, 2), (4, 2, 2), (14, 1, 1)])
def test_hdf5_arrays_are_mapped(
    tmp_path: Path, chunks: tuple[int, ...] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = RNG.integers(0, 256, (14, 2, 4), np.uint8)
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file.create_dataset("x", data=values, chunks=chunks)
        file.create_dataset("a/y", data=values.astype("i2"), compression="gzip")
    np.testing.assert_array_equal(array(tmp_path / "x.h5", "x", np.uint8, None, 2, 4), values)
    monkeypatch.setattr(sandbox, "converted", None)  # the second time, no process starts
    found = array(tmp_path / "x.h5", "x", np.integer, 14, 2, 4)
    np.testing.assert_array_equal(found[[3, 13, 0]], values[[3, 13, 0]])
    monkeypatch.undo()
    assert array(tmp_path / "x.h5", "a/y", np.integer, 14, 2, 4).dtype == np.int16


def test_hdf5_is_read_in_blocks_of_whole_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandboxed, "_BLOCK", 20)
    values = np.arange(30, dtype=np.uint8).reshape(15, 2)
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file.create_dataset("x", data=values, chunks=(4, 2))
    _, *blocks = sandboxed.hdf5(str(tmp_path / "x.h5"), "x")
    assert [len(block) for block in blocks] == [16, 14] and b"".join(blocks) == values.tobytes()


def test_damage_inside_of_hdf5_is_a_user_error(tmp_path: Path) -> None:
    values = np.random.default_rng(0).integers(0, 256, (64, 8, 8), np.uint8)
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file.create_dataset("x", data=values, chunks=(8, 8, 8), fletcher32=True)
    data = bytearray((tmp_path / "x.h5").read_bytes())
    data[data.index(values[40].tobytes()[:16])] ^= 1
    (tmp_path / "x.h5").write_bytes(data)
    with pytest.raises(UserError, match=r"^x\.h5 is truncated or damaged: "):
        array(tmp_path / "x.h5", "x", np.uint8, 64, 8, 8)


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


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("y", "does not contain y"),
        ("latents", "is not an array"),
        ("outside", "has a link for outside"),
        ("folder/x", "has a link for folder/x"),
        ("soft", "has a link for soft"),
        ("bomb", "claims 1099511627776 bytes"),
        ("raw", "in another file"),
        ("virtual", "in another file"),
    ],
)
def test_hdf5_that_is_not_plain_data_is_refused(hdf5: Path, name: str, message: str) -> None:
    with pytest.raises(sandboxed.RefusedError, match=message):
        list(sandboxed.hdf5(str(hdf5), name))


# ------------------------------------------------------------------------------------------------- the sandbox


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("import ctypes; ctypes.string_at(0)", "is damaged: its library crashed"),
        ("bytearray(2**31)", "needs more memory"),
        ("open('written', 'wb', 0).write(b'x')", "File too large"),
        ("import time; time.sleep(60)", "is damaged: its library made no progress for 1 s"),
        ("raise KeyError('some text')", "is truncated or damaged: 'some text'"),
    ],
)
def test_a_library_that_misbehaves_is_a_user_error(
    code: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = Path(sandboxed.__file__).read_text().replace("    import h5py\n", f"    {code}\n    import h5py\n")
    (tmp_path / "program.py").write_text(program)
    monkeypatch.setattr(sandboxed, "__file__", str(tmp_path / "program.py"))
    monkeypatch.setattr(sandbox, "SECONDS", 1)
    monkeypatch.setattr(sandbox, "MEMORY", 2**30)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=f"^it {message}" if "File" not in message else message):
        list(sandbox.converted("it", "hdf5", tmp_path / "x.h5", "x"))


# ------------------------------------------------------------------------------------------------- pickles


BATCH = RNG.integers(0, 256, (4, 3072), np.uint8)


def test_a_python_2_pickle_is_read_as_a_general_unpickler_reads_it() -> None:
    data = cifar.python2({"data": BATCH, "labels": [6, 9, 9, 4], "batch_label": "training batch 1 of 5"})
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
