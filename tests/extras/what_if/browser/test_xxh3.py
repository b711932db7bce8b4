"""The plain XXH3 gives the results of the library xxhash."""

import random

import xxhash

from nanovllm_extras.what_if.browser.xxh3 import xxh3_64_intdigest

SEEDS = (0, 1, 2**64 - 1, 2**255 + 7)  # the last one is the root of requests with a salt: its lowest bits count


def test_every_length_and_random_seeds_give_the_hash_of_the_library():
    generator = random.Random(0)
    lengths = [*range(600), *(1024 * i + d for i in (1, 2, 4, 5) for d in (-1, 0, 1, 63, 64, 65))]
    for length in lengths:
        data = generator.randbytes(length)
        for seed in (*SEEDS, generator.getrandbits(64)):
            assert xxh3_64_intdigest(data, seed=seed) == xxhash.xxh3_64_intdigest(data, seed=seed), (length, seed)
