"""TFRecord files and tf.train.Examples for tests: messages by the protobuf library, the framing by its own rule."""

import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import crc32c
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory


def example(features: Mapping[str, Sequence[bytes | int | float]]) -> bytes:
    """A serialised tf.train.Example."""
    message = _example()
    for name, values in features.items():
        kind = {bytes: "bytes_list", int: "int64_list", float: "float_list"}[type(values[0])]
        getattr(message.features.feature[name], kind).value.extend(values)
    serialised: bytes = message.SerializeToString(deterministic=True)
    return serialised


def framed(payloads: Iterable[bytes]) -> bytes:
    """A TFRecord file of these payloads."""
    parts = []
    for payload in payloads:
        length = struct.pack("<Q", len(payload))
        parts += [length, checksum(length), payload, checksum(payload)]
    return b"".join(parts)


def checksum(data: bytes | bytearray) -> bytes:
    """Return the masked CRC-32C of a length or a payload."""
    crc = crc32c.crc32c(data)
    rotated = (crc >> 15) | ((crc << 17) & 0xFFFFFFFF)
    return struct.pack("<I", (rotated + 0xA282EAD8) % 2**32)


def _example() -> Any:
    """tensorflow/core/example/{example,feature}.proto, written down here."""
    file = descriptor_pb2.FileDescriptorProto(name="example.proto", package="tensorflow", syntax="proto3")
    kinds = {
        "BytesList": ("TYPE_BYTES", None),
        "FloatList": ("TYPE_FLOAT", True),
        "Int64List": ("TYPE_INT64", True),
    }
    for name, (kind, packed) in kinds.items():
        field = file.message_type.add(name=name).field.add(name="value", number=1, type=kind, label="LABEL_REPEATED")
        if packed:
            field.options.packed = True
    feature = file.message_type.add(name="Feature")
    feature.oneof_decl.add(name="kind")
    for number, (name, kind) in enumerate(
        (("bytes_list", "BytesList"), ("float_list", "FloatList"), ("int64_list", "Int64List")), start=1
    ):
        feature.field.add(
            name=name,
            number=number,
            type="TYPE_MESSAGE",
            type_name=f".tensorflow.{kind}",
            label="LABEL_OPTIONAL",
            oneof_index=0,
        )
    features = file.message_type.add(name="Features")
    entry = features.nested_type.add(name="FeatureEntry")
    entry.options.map_entry = True
    entry.field.add(name="key", number=1, type="TYPE_STRING", label="LABEL_OPTIONAL")
    entry.field.add(
        name="value", number=2, type="TYPE_MESSAGE", type_name=".tensorflow.Feature", label="LABEL_OPTIONAL"
    )
    features.field.add(
        name="feature",
        number=1,
        type="TYPE_MESSAGE",
        type_name=".tensorflow.Features.FeatureEntry",
        label="LABEL_REPEATED",
    )
    file.message_type.add(name="Example").field.add(
        name="features",
        number=1,
        type="TYPE_MESSAGE",
        type_name=".tensorflow.Features",
        label="LABEL_OPTIONAL",
    )
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("tensorflow.Example"))()
