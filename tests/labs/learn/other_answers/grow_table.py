from labs.on_demand import BlockManager


class Blocks(BlockManager):
    def try_grow(self, seq):
        entry = (len(seq.token_ids) - 1) // self.block_size  # of the newest token
        if entry == len(seq.block_table) and self.free:
            seq.block_table.append(self.free[-1])
            del self.free[-1]
        return entry < len(seq.block_table)
