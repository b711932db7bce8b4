"""XXH3 with 64 bits in plain Python: the results of `xxhash.xxh3_64_intdigest`, where that library is not available.

The algorithm is specified at https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md. Equal hashes make the
recordings of a browser equal to those of the command, byte by byte. A block of 16 tokens has 64 bytes, so `hash_medium`
is used most.
"""

from struct import iter_unpack, unpack_from

MASK = 2**64 - 1
PRIME32 = 0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D
PRIME64 = 0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5
PRIME_MX1, PRIME_MX2 = 0x165667919E3779F9, 0x9FB21C651E98DF25
SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221b8084674f743248e"
    "e03590e6813a264c3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8a8fa763fe39c343ff9dcbbc7c70b4f1d8a"
    "51e04bcdb45931c89f7ec9d9787364eac5ac8334d3ebc3c581a0fffa1363eb170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc8f"
    "f8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)
STRIPE = 64
BLOCK = (len(SECRET) - STRIPE) // 8 * STRIPE
"""Bytes after which the state of a long input is scrambled."""


def xxh3_64_intdigest(data: bytes, seed: int = 0) -> int:
    """Return the hash of `data`. Only the lowest 64 bits of `seed` are used."""
    seed &= MASK
    if len(data) > 240:
        return hash_long(data, seed)
    if len(data) > 128:
        return hash_upper_medium(data, seed)
    return hash_medium(data, seed) if len(data) > 16 else hash_short(data, seed)


def read(data: bytes, offset: int) -> int:
    """Return the 64 bits at `offset`, little-endian."""
    return int(unpack_from("<Q", data, offset)[0])


def read_half(data: bytes, offset: int) -> int:
    return int(unpack_from("<I", data, offset)[0])


def rotate(value: int, by: int) -> int:
    return (value << by | value >> 64 - by) & MASK


def swap(value: int, size: int = 8) -> int:
    """Return `value` with its bytes in reverse order."""
    return int.from_bytes(value.to_bytes(size, "little"), "big")


def fold(a: int, b: int) -> int:
    """Return the exclusive or of both halves of the product, which has 128 bits."""
    product = a * b
    return (product ^ product >> 64) & MASK


def avalanche(value: int) -> int:
    value = (value ^ value >> 37) * PRIME_MX1 & MASK
    return value ^ value >> 32


def avalanche_64(value: int) -> int:
    """Return `value` mixed as at the end of XXH64."""
    value = (value ^ value >> 33) * PRIME64[1] & MASK
    value = (value ^ value >> 29) * PRIME64[2] & MASK
    return value ^ value >> 32


def hash_short(data: bytes, seed: int) -> int:
    """Return the hash of at most 16 bytes."""
    size = len(data)
    if size > 8:
        low = read(data, 0) ^ ((read(SECRET, 24) ^ read(SECRET, 32)) + seed) & MASK
        high = read(data, size - 8) ^ ((read(SECRET, 40) ^ read(SECRET, 48)) - seed) & MASK
        return avalanche((size + swap(low) + high + fold(low, high)) & MASK)
    if size > 3:
        seed ^= swap(seed & 0xFFFFFFFF, 4) << 32
        value = read_half(data, size - 4) + (read_half(data, 0) << 32)
        value ^= ((read(SECRET, 8) ^ read(SECRET, 16)) - seed) & MASK
        value = (value ^ rotate(value, 49) ^ rotate(value, 24)) * PRIME_MX2 & MASK
        value = (value ^ (value >> 35) + size) * PRIME_MX2 & MASK
        return value ^ value >> 28
    if size:
        value = data[0] << 16 | data[size >> 1] << 24 | data[-1] | size << 8
        return avalanche_64(value ^ ((read_half(SECRET, 0) ^ read_half(SECRET, 4)) + seed) & MASK)
    return avalanche_64(seed ^ read(SECRET, 56) ^ read(SECRET, 64))


def mix(data: bytes, offset: int, place: int, seed: int) -> int:
    """Return the mix of 16 bytes of `data` with 16 bytes of the secret at `place`."""
    low, high = unpack_from("<QQ", data, offset)
    first, second = unpack_from("<QQ", SECRET, place)
    return fold(low ^ (first + seed) & MASK, high ^ (second - seed) & MASK)


def hash_medium(data: bytes, seed: int) -> int:
    """Return the hash of 17 to 128 bytes: pairs of 16 bytes, from both ends to the middle."""
    size = len(data)
    value = size * PRIME64[0]
    for i in range((size - 1) // 32 + 1):
        value += mix(data, 16 * i, 32 * i, seed) + mix(data, size - 16 * (i + 1), 32 * i + 16, seed)
    return avalanche(value & MASK)


def hash_upper_medium(data: bytes, seed: int) -> int:
    """Return the hash of 129 to 240 bytes."""
    size = len(data)
    value = avalanche((size * PRIME64[0] + sum([mix(data, 16 * i, 16 * i, seed) for i in range(8)])) & MASK)
    value += sum([mix(data, 16 * i, 16 * (i - 8) + 3, seed) for i in range(8, size // 16)])
    return avalanche((value + mix(data, size - 16, 119, seed)) & MASK)


def hash_long(data: bytes, seed: int) -> int:
    """Return the hash of more than 240 bytes: stripes of 64 bytes change eight accumulators."""
    secret = SECRET
    if seed:
        pairs = iter_unpack("<QQ", SECRET)
        secret = b"".join(
            ((first + seed) & MASK).to_bytes(8, "little") + ((second - seed) & MASK).to_bytes(8, "little")
            for first, second in pairs
        )
    accumulators = [PRIME32[2], *PRIME64[:4], PRIME32[1], PRIME64[4], PRIME32[0]]
    last = (len(data) - 1) // STRIPE * STRIPE
    for start in range(0, last, STRIPE):
        accumulate(accumulators, data, start, secret, start % BLOCK // 8)
        if start % BLOCK == BLOCK - STRIPE:
            scramble(accumulators, secret)
    accumulate(accumulators, data, len(data) - STRIPE, secret, len(secret) - STRIPE - 7)
    value = len(data) * PRIME64[0]
    for i in range(0, 8, 2):
        first, second = unpack_from("<QQ", secret, 11 + 8 * i)
        value += fold(accumulators[i] ^ first, accumulators[i + 1] ^ second)
    return avalanche(value & MASK)


def accumulate(accumulators: list[int], data: bytes, start: int, secret: bytes, place: int) -> None:
    values, keys = unpack_from("<8Q", data, start), unpack_from("<8Q", secret, place)
    for i, (value, key) in enumerate(zip(values, keys, strict=True)):
        key ^= value
        accumulators[i ^ 1] = accumulators[i ^ 1] + value & MASK
        accumulators[i] = accumulators[i] + (key & 0xFFFFFFFF) * (key >> 32) & MASK


def scramble(accumulators: list[int], secret: bytes) -> None:
    for i, key in enumerate(unpack_from("<8Q", secret, len(secret) - STRIPE)):
        value = accumulators[i]
        accumulators[i] = (value ^ value >> 47 ^ key) * PRIME32[0] & MASK
