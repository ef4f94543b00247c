"""The hash functions of strings whose values programs and saved models depend on.

FarmHash's fingerprint of 64 bits, SipHash-2-4 and a variant of MurmurHash, on Python's integers.
"""

from __future__ import annotations

import struct

_MASK = (1 << 64) - 1
_K0 = 0xC3A5C85C97CB3127
_K1 = 0xB492B66FBE98F273
_K2 = 0x9AE16A3B2F90404F
_MURMUR = 0xC6A4A7935BD1E995
_MURMUR_SEED = 0xDECAFCAFFE
_fetch64 = struct.Struct("<Q").unpack_from
_fetch32 = struct.Struct("<I").unpack_from


def _rotated(value: int, count: int) -> int:
    return ((value >> count) | (value << (64 - count))) & _MASK


def _mixed(value: int) -> int:
    return value ^ (value >> 47)


def _of_two(first: int, second: int, factor: int) -> int:
    a = _mixed(((first ^ second) * factor) & _MASK)
    return (_mixed(((second ^ a) * factor) & _MASK) * factor) & _MASK


def _of_short(data: bytes) -> int:
    size = len(data)
    factor = (_K2 + size * 2) & _MASK
    if size >= 8:
        a = (_fetch64(data, 0)[0] + _K2) & _MASK
        b = _fetch64(data, size - 8)[0]
        c = (_rotated(b, 37) * factor + a) & _MASK
        d = ((_rotated(a, 25) + b) * factor) & _MASK
        return _of_two(c, d, factor)
    if size >= 4:
        a = _fetch32(data, 0)[0]
        return _of_two((size + (a << 3)) & _MASK, _fetch32(data, size - 4)[0], factor)
    if not size:
        return _K2
    y = data[0] + (data[size >> 1] << 8)
    z = size + (data[-1] << 2)
    return (_mixed((y * _K2 ^ z * _K0) & _MASK) * _K2) & _MASK


def _ends(data: bytes, first: int, factor: int) -> tuple[int, int, int]:
    """Returns what strings of 17 to 64 bytes have in common: two sums, and the first product."""
    size = len(data)
    a = (_fetch64(data, 0)[0] * first) & _MASK
    b = _fetch64(data, 8)[0]
    c = (_fetch64(data, size - 8)[0] * factor) & _MASK
    d = (_fetch64(data, size - 16)[0] * _K2) & _MASK
    y = (_rotated((a + b) & _MASK, 43) + _rotated(c, 30) + d) & _MASK
    return y, (a + _rotated((b + _K2) & _MASK, 18) + c) & _MASK, a


def _of_medium(data: bytes) -> int:
    size = len(data)
    factor = (_K2 + size * 2) & _MASK
    if size <= 32:
        first, second, _ = _ends(data, _K1, factor)
        return _of_two(first, second, factor)
    y, other, a = _ends(data, _K2, factor)
    z = _of_two(y, other, factor)
    e = (_fetch64(data, 16)[0] * factor) & _MASK
    f = _fetch64(data, 24)[0]
    g = ((y + _fetch64(data, size - 32)[0]) * factor) & _MASK
    h = ((z + _fetch64(data, size - 24)[0]) * factor) & _MASK
    first = (_rotated((e + f) & _MASK, 43) + _rotated(g, 30) + h) & _MASK
    return _of_two(first, (e + _rotated((f + a) & _MASK, 18) + g) & _MASK, factor)


def _weak(data: bytes, at: int, a: int, b: int) -> tuple[int, int]:
    w, x, y, z = (_fetch64(data, at + 8 * i)[0] for i in range(4))
    a = (a + w) & _MASK
    b = _rotated((b + a + z) & _MASK, 21)
    c = a
    a = (a + x + y) & _MASK
    b = (b + _rotated(a, 44)) & _MASK
    return (a + z) & _MASK, (b + c) & _MASK


class _State:
    """The seven numbers that are kept over the blocks of a long string."""

    def __init__(self, data: bytes) -> None:
        self.x = (81 * _K2 + _fetch64(data, 0)[0]) & _MASK
        self.y = (81 * _K1 + 113) & _MASK
        self.z = (_mixed((self.y * _K2 + 113) & _MASK) * _K2) & _MASK
        self.v = (0, 0)
        self.w = (0, 0)

    def add(self, data: bytes, at: int, factor: int, weight: int) -> None:
        """Mixes a block of 64 bytes in; the last block has another factor and weight."""
        x, y, z, v, w = self.x, self.y, self.z, self.v, self.w
        x = (_rotated((x + y + v[0] + _fetch64(data, at + 8)[0]) & _MASK, 37) * factor) & _MASK
        y = (_rotated((y + v[1] + _fetch64(data, at + 48)[0]) & _MASK, 42) * factor) & _MASK
        x ^= (w[1] * weight) & _MASK
        y = (y + v[0] * weight + _fetch64(data, at + 40)[0]) & _MASK
        z = (_rotated((z + w[0]) & _MASK, 33) * factor) & _MASK
        self.v = _weak(data, at, (v[1] * factor) & _MASK, (x + w[0]) & _MASK)
        other = (y + _fetch64(data, at + 16)[0]) & _MASK
        self.w = _weak(data, at + 32, (z + w[1]) & _MASK, other)
        self.x, self.y, self.z = z, y, x


def _of_long(data: bytes) -> int:
    size, state = len(data), _State(data)
    for at in range(0, (size - 1) // 64 * 64, 64):
        state.add(data, at, _K1, 1)
    factor = (_K1 + ((state.z & 0xFF) << 1)) & _MASK
    first = (state.w[0] + ((size - 1) & 63)) & _MASK
    state.v = ((state.v[0] + first) & _MASK, state.v[1])
    state.w = ((first + state.v[0]) & _MASK, state.w[1])
    state.add(data, size - 64, factor, 9)
    low = _of_two(state.v[0], state.w[0], factor) + _mixed(state.y) * _K0 + state.z
    high = _of_two(state.v[1], state.w[1], factor) + state.x
    return _of_two(low & _MASK, high & _MASK, factor)


def fingerprint64(data: bytes) -> int:
    """Returns FarmHash's fingerprint of 64 bits.

    >>> hex(fingerprint64(b""))
    '0x9ae16a3b2f90404f'
    """
    size = len(data)
    return _of_short(data) if size <= 16 else _of_medium(data) if size <= 64 else _of_long(data)


def murmur64(data: bytes) -> int:
    """Returns MurmurHash64A with the seed of TensorFlow.

    >>> murmur64(b"a") == murmur64(b"a"), murmur64(b"a") == murmur64(b"b")
    (True, False)
    """
    size = len(data)
    found = (_MURMUR_SEED ^ (size * _MURMUR)) & _MASK
    for at in range(0, size // 8 * 8, 8):
        k = (_mixed((_fetch64(data, at)[0] * _MURMUR) & _MASK) * _MURMUR) & _MASK
        found = ((found ^ k) * _MURMUR) & _MASK
    if size % 8:
        found ^= int.from_bytes(data[size // 8 * 8 :], "little")
        found = (found * _MURMUR) & _MASK
    return _mixed((_mixed(found) * _MURMUR) & _MASK)


def siphash(data: bytes, key: tuple[int, int]) -> int:
    """Returns SipHash-2-4 with a key of two integers of 64 bits.

    >>> key = struct.unpack("<QQ", bytes(range(16)))
    >>> hex(siphash(bytes(range(15)), key))
    '0xa129ca6149be45e5'
    """
    first, second = key[0] & _MASK, key[1] & _MASK
    v0, v1 = first ^ 0x736F6D6570736575, second ^ 0x646F72616E646F6D
    v2, v3 = first ^ 0x6C7967656E657261, second ^ 0x7465646279746573
    padded = data + bytes(7 - len(data) % 8) + bytes([len(data) & 0xFF])
    state = (v0, v1, v2, v3)
    for at in range(0, len(padded), 8):
        word = _fetch64(padded, at)[0]
        v0, v1, v2, v3 = state
        state = _rounds((v0, v1, v2, v3 ^ word), 2)
        state = (state[0] ^ word, *state[1:])
    v0, v1, v2, v3 = state
    v0, v1, v2, v3 = _rounds((v0, v1, v2 ^ 0xFF, v3), 4)
    return v0 ^ v1 ^ v2 ^ v3


def _rounds(state: tuple[int, int, int, int], count: int) -> tuple[int, int, int, int]:
    # Rotations to the left.
    v0, v1, v2, v3 = state
    for _ in range(count):
        v0 = (v0 + v1) & _MASK
        v1 = _rotated(v1, 51) ^ v0
        v0 = _rotated(v0, 32)
        v2 = (v2 + v3) & _MASK
        v3 = _rotated(v3, 48) ^ v2
        v0 = (v0 + v3) & _MASK
        v3 = _rotated(v3, 43) ^ v0
        v2 = (v2 + v1) & _MASK
        v1 = _rotated(v1, 47) ^ v2
        v2 = _rotated(v2, 32)
    return v0, v1, v2, v3
