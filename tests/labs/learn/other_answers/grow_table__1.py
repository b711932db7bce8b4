from labs.on_demand import BlockManager


class Blocks(BlockManager):
    def try_grow(self, seq):
        num_slots = len(seq.block_table) * self.block_size
        if len(seq.token_ids) <= num_slots:
            return True
        try:
            seq.block_table += [self.free.pop()]
        except IndexError:
            return False
        return True
