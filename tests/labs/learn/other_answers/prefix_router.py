"""Keeps whole prompts, and compares them token by token."""


class Router:
    def __init__(self, num_engines, block_size):
        self.block_size = block_size
        self.load = [0] * num_engines
        self.sent = [[] for _ in self.load]

    def computed(self, engine, num_tokens):
        self.load[engine] -= num_tokens

    def num_cached(self, engine, prompt):
        longest = 0
        for one in self.sent[engine]:
            num_same = 0
            while num_same < min(len(one), len(prompt) - 1) and one[num_same] == prompt[num_same]:
                num_same += 1
            longest = max(longest, num_same - num_same % self.block_size)
        return longest

    def route(self, prompt):
        best = None
        for engine, load in enumerate(self.load):
            num = len(prompt) - self.num_cached(engine, prompt)
            if best is None or load + num < best[0]:
                best = load + num, engine
        self.load[best[1]] = best[0]
        self.sent[best[1]].append(prompt[: len(prompt) - len(prompt) % self.block_size])
        return best[1]
