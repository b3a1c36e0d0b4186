"""Small CIFAR-10s and CIFAR-100s in their authors' format, both versions; the pickles as Python 2 wrote them."""

import numpy as np

PER_BATCH = 30


def python2(value: object) -> bytes:
    """A pickle as Python 2 wrote it: protocol 2, text and bytes both as its str."""
    return _Pickler(value).data


class _Pickler:
    """Opcodes of Python 2's cPickle for dicts, lists, numbers, text and arrays of uint8 [n, m]."""

    def __init__(self, value: object) -> None:
        self.data = b"\x80\x02" + self._put(value) + b"."

    def _put(self, value: object) -> bytes:
        match value:
            case int():
                return b"J" + value.to_bytes(4, "little", signed=True)
            case str():
                return b"T" + len(value).to_bytes(4, "little") + value.encode("latin1")
            case bytes():
                return b"T" + len(value).to_bytes(4, "little") + value
            case list():
                return b"](" + b"".join(map(self._put, value)) + b"e"
            case dict():
                return b"}(" + b"".join(self._put(k) + self._put(v) for k, v in value.items()) + b"u"
            case np.ndarray():
                dtype = (
                    b"cnumpy\ndtype\n" + self._put("u1") + b"K\x00K\x01\x87R"
                    b"(K\x03" + self._put("|") + b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
                )
                shape = b"".join(self._put(size) for size in value.shape) + b"\x86"
                return (
                    b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85" + self._put("b") + b"\x87R"
                    b"(K\x01" + shape + dtype + b"\x89" + self._put(value.tobytes()) + b"tb"
                )
        raise TypeError(type(value))


def made(classes: int, seed: int, number: int) -> tuple[np.ndarray, list[int]]:
    """Images [n, 32, 32, 3] and labels."""
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, (number, 32, 32, 3), np.uint8), rng.integers(0, classes, number).tolist()


def batches(classes: int) -> list[tuple[str, np.ndarray, list[int]]]:
    """(file without ending, images, labels)."""
    names = [f"data_batch_{n}" for n in range(1, 6)] + ["test_batch"] if classes == 10 else ["train", "test"]
    sizes = [PER_BATCH] * 6 if classes == 10 else [5 * PER_BATCH, PER_BATCH]
    return [(name, *made(classes, seed, size)) for seed, (name, size) in enumerate(zip(names, sizes, strict=True))]


def planes(images: np.ndarray) -> np.ndarray:
    """[n, 3072]: the red plane, the green one, the blue one."""
    return np.concatenate([images[..., channel].reshape(len(images), -1) for channel in range(3)], 1)


CLASS_NAMES = {
    10: ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"],
    100: [f"fine_{number}" for number in range(100)],
}


def members(classes: int, version: str) -> dict[str, bytes]:
    """path -> content of the archive, with the files that nobody reads."""
    names = CLASS_NAMES[classes]
    found: dict[str, bytes] = {}
    if version == "python":
        folder = "cifar-10-batches-py" if classes == 10 else "cifar-100-python"
        for name, images, labels in batches(classes):
            own = {"labels": labels} if classes == 10 else {"fine_labels": labels, "coarse_labels": [0] * len(labels)}
            found[f"{folder}/{name}"] = python2({"batch_label": name, "data": planes(images)} | own)
        meta = (
            {"label_names": names} if classes == 10 else {"coarse_label_names": ["c"] * 20, "fine_label_names": names}
        )
        found[f"{folder}/{'batches.meta' if classes == 10 else 'meta'}"] = python2(meta)
        return found | {f"{folder}/readme.html": b"<html>"}
    folder = "cifar-10-batches-bin" if classes == 10 else "cifar-100-binary"
    for name, images, labels in batches(classes):
        coarse = b"" if classes == 10 else b"\x05"
        records = zip(labels, planes(images), strict=True)
        found[f"{folder}/{name}.bin"] = b"".join(coarse + bytes([label]) + row.tobytes() for label, row in records)
    listed = "\n".join(names) + ("\n\n" if classes == 10 else "")
    found[f"{folder}/{'batches.meta.txt' if classes == 10 else 'fine_label_names.txt'}"] = listed.encode()
    return found
