"""TFRecords and tf.train.Examples, against messages that the protobuf library wrote and an own framing."""

import io
import struct

import pytest

from ray_jobs.sources.archives.examples import feature_range, parse_example, tfrecords
from tests.support.tfrecords import example, framed

FEATURES: dict[str, list[bytes] | list[int] | list[float]] = {
    "image": [b"\xff\xd8" + bytes(range(256)) * 3],
    "filename": [b"video_400_0_884.jpg"],
    "label": [5],
    "objects/size": [3, -1, 2**63 - 1, -(2**63)],
    "bbox": [0.25, -1.5, 3.0],
    "texts": [b"one", b"", b"three"],
}


def test_an_example_is_read_as_protobuf_wrote_it() -> None:
    assert parse_example(example(FEATURES)) == FEATURES
    assert parse_example(b"") == {}


def test_numbers_that_are_not_packed_are_read_too() -> None:
    """An older writer gives every number a field of its own."""
    integers = b"".join(b"\x08" + bytes([value]) for value in (1, 2, 3))
    floats = b"".join(b"\x0d" + struct.pack("<f", value) for value in (0.5, 2.0))

    def entry(name: bytes, kind: int, values: bytes) -> bytes:
        value = bytes([kind << 3 | 2, len(values)]) + values
        inner = b"\x0a" + bytes([len(name)]) + name + b"\x12" + bytes([len(value)]) + value
        return b"\x0a" + bytes([len(inner)]) + inner

    features = entry(b"i", 3, integers) + entry(b"f", 2, floats)
    assert parse_example(b"\x0a" + bytes([len(features)]) + features) == {"i": [1, 2, 3], "f": [0.5, 2.0]}


def test_an_image_is_a_byte_range_of_its_file() -> None:
    payloads = [example(FEATURES | {"image": [bytes([number]) * 1000]}) for number in range(3)]
    data = framed(payloads)
    ranges = list(tfrecords(io.BytesIO(data)))
    for number, (offset, length) in enumerate(ranges):
        payload = data[offset : offset + length]
        assert payload == payloads[number]
        start, size = feature_range(payload, "image")
        assert data[offset + start : offset + start + size] == bytes([number]) * 1000
    assert list(tfrecords(io.BytesIO(b"before" + data + b"after"), 6, 6 + len(data))) == [
        (6 + offset, length) for offset, length in ranges
    ]
    with pytest.raises(ValueError, match="no feature 'img'; features: bbox, filename"):
        feature_range(payloads[0], "img")
    for name in ("label", "texts"):
        with pytest.raises(ValueError, match="not one value of bytes"):
            feature_range(payloads[0], name)


@pytest.mark.parametrize(
    ("place", "message"),
    [
        (0, "record 0 has a damaged length"),
        (9, "record 0 has a damaged length"),
        (20, "record 0 is damaged"),
        (-1, "record 1 is damaged"),
    ],
)
def test_a_changed_byte_is_found(place: int, message: str) -> None:
    data = bytearray(framed([b"a" * 30, b"b" * 30]))
    data[place] ^= 1
    with pytest.raises(ValueError, match=message):
        list(tfrecords(io.BytesIO(data)))


def test_the_end_of_a_file_is_noticed() -> None:
    data = framed([b"a" * 30, b"b" * 30])
    for size in range(len(data)):
        records = tfrecords(io.BytesIO(data[:size]))
        if size in (0, 46):
            assert len(list(records)) == size // 46
        else:
            with pytest.raises(ValueError, match=f"record {size // 46} is truncated"):
                list(records)
