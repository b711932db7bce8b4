from itertools import takewhile

from labs.one_file import BlockManager


class Blocks(BlockManager):
    def find(self, seq):
        hashes = (self.hash_block(seq, i) for i in range((len(seq.token_ids) - 1) // self.block_size))
        return [self.block_of_hash[one] for one in takewhile(self.block_of_hash.__contains__, hashes)]

    def try_admit(self, seq):
        hits = self.find(seq)
        free = dict(self.free)
        for block_id in hits:
            free.pop(block_id, None)
        num_new = self.num_blocks_for(len(seq.token_ids)) - len(hits)
        if len(free) < num_new:
            return False
        self.free = free
        for block_id in hits:
            self.num_owners[block_id] += 1
        seq.block_table = [*hits, *(self.take() for _ in range(num_new))]
        seq.num_computed_tokens = sum(self.block_size for _ in hits)
        return True
