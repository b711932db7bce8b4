"""A tree of blocks for each engine, and `min` with a key."""


class Router:
    def __init__(self, num_engines, block_size):
        self.block_size = block_size
        self.load = [0] * num_engines
        self.roots = [{} for _ in range(num_engines)]

    def computed(self, engine, num_tokens):
        self.load[engine] -= num_tokens

    def blocks_of(self, prompt):
        return [tuple(prompt[i : i + self.block_size]) for i in range(0, len(prompt), self.block_size)]

    def num_cached(self, engine, prompt):
        node, depth = self.roots[engine], 0
        for block in self.blocks_of(prompt[:-1]):
            if block not in node or len(block) < self.block_size:
                break
            node, depth = node[block], depth + 1
        return depth * self.block_size

    def route(self, prompt):
        def cost(engine):
            return self.load[engine] + len(prompt) - self.num_cached(engine, prompt)

        engine = min(range(len(self.load)), key=cost)
        self.load[engine] = cost(engine)
        node = self.roots[engine]
        for block in self.blocks_of(prompt):
            if len(block) == self.block_size:
                node = node.setdefault(block, {})
        return engine
