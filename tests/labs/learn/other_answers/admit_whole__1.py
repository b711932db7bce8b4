from labs.on_demand import BlockManager


class Blocks(BlockManager):
    def try_admit(self, seq):
        num_slots = len(self.free) * self.block_size
        if num_slots < len(seq.token_ids):
            return False
        seq.num_computed_tokens = 0
        seq.block_table = []
        while len(seq.block_table) * self.block_size < len(seq.token_ids):
            seq.block_table.append(self.free.pop())
        return True
