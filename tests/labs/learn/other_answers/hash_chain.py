from hashlib import md5

from labs.one_file import BlockManager


class Blocks(BlockManager):
    def hash_block(self, seq, i):
        """Hash the whole beginning: slower for long texts, and right."""
        return md5(",".join(map(str, seq.token_ids[: (i + 1) * self.block_size])).encode()).hexdigest()
