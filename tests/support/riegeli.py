"""Checksums of Riegeli's files (array_record's are such), by which mutations of what is behind them are read.

A block of 64 KiB begins with a header of 24 bytes; the first chunk of a block, here always, comes right behind. A chunk
has a header of 40 bytes: hash of the rest of the header, size and hash of its data, type and records, unpacked size.
"""

import struct
from collections.abc import Sequence

BLOCK = 2**16
_KEY = struct.unpack("<4Q", b"Riegeli/records\n" * 2)
_WORD = 2**64 - 1
_FIRST = (0xDBE6D5D5FE4CCE2F, 0xA4093822299F31D0, 0x13198A2E03707344, 0x243F6A8885A308D3)
_SECOND = (0x3BD39E10CB0EF593, 0xC0ACF169B5F18A8C, 0xBE5466CF34E90C6C, 0x452821E638D01377)


def checked(block: bytes) -> bytes:
    """A block, without the zeros at its end, with right hashes of its header, and of the chunks in it."""
    out, offset = bytearray(block), 24
    if len(out) >= offset:
        out[:8] = _hashed(out[8:24])
    while offset + 40 <= len(out):
        (size,) = struct.unpack_from("<Q", out, offset + 8)
        end = offset + 40 + size
        if end <= len(out):
            out[offset + 16 : offset + 24] = _hashed(out[offset + 40 : end])
        out[offset : offset + 8] = _hashed(out[offset + 8 : offset + 40])
        offset = end
    return bytes(out)


def _hashed(data: bytes | bytearray) -> bytes:
    return highway_hash(bytes(data)).to_bytes(8, "little")


def highway_hash(data: bytes, key: Sequence[int] = _KEY) -> int:
    """HighwayHash-64 (Alakuijala, Cox, Wassenberg 2016), as its portable C++ has it."""
    a = [first ^ one for first, one in zip(_FIRST, key, strict=True)]
    b = [second ^ _turned(one) for second, one in zip(_SECOND, key, strict=True)]
    state = (a, b, list(_FIRST), list(_SECOND))
    for start in range(0, len(data) - 31, 32):
        _update(state, struct.unpack_from("<4Q", data, start))
    if left := len(data) % 32:
        a[:] = [(one + (left << 32) + left) & _WORD for one in a]
        b[:] = [_rotated(one, left) for one in b]
        rest, whole = data[-left:], left & ~3
        packet = bytearray(rest[:whole].ljust(32, b"\0"))
        if left & 16:
            packet[28:] = rest[-4:]
        elif more := left & 3:
            packet[16:19] = bytes((rest[whole], rest[whole + (more >> 1)], rest[-1]))
        _update(state, struct.unpack("<4Q", packet))
    for _ in range(4):
        _update(state, [_turned(a[lane]) for lane in (2, 3, 0, 1)])
    return sum(words[0] for words in state) & _WORD


def _turned(word: int) -> int:
    return (word >> 32 | word << 32) & _WORD


def _rotated(word: int, by: int) -> int:
    """Both halves."""
    halves = (word & 0xFFFFFFFF, word >> 32)
    low, high = ((half << by | half >> (32 - by)) & 0xFFFFFFFF for half in halves)
    return low | high << 32


def _update(state: tuple[list[int], list[int], list[int], list[int]], lanes: Sequence[int]) -> None:
    a, b, c, d = state
    for i in range(4):
        b[i] = (b[i] + c[i] + lanes[i]) & _WORD
        c[i] ^= (b[i] & 0xFFFFFFFF) * (a[i] >> 32)
        a[i] = (a[i] + d[i]) & _WORD
        d[i] ^= (a[i] & 0xFFFFFFFF) * (b[i] >> 32)
    for of, to in ((b, a), (a, b)):
        for i in (0, 2):
            mixed = struct.pack("<2Q", of[i], of[i + 1])
            order = (3, 12, 2, 5, 14, 1, 15, 0, 11, 4, 10, 13, 9, 6, 8, 7)
            low, high = struct.unpack("<2Q", bytes(mixed[place] for place in order))
            to[i], to[i + 1] = (to[i] + low) & _WORD, (to[i + 1] + high) & _WORD
