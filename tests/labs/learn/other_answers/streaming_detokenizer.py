"""Keeps all tokens, and looks at the first byte of the last character for its length."""


class Detokenizer:
    def __init__(self, vocab):
        self.vocab = vocab
        self.token_ids = []
        self.num_shown = 0

    def append(self, token_id):
        self.token_ids.append(token_id)
        data = b"".join(self.vocab[i] for i in self.token_ids)
        end = start = self.num_shown
        while start < len(data):
            first = data[start]
            start += 1 if first < 0x80 else 2 if first < 0xE0 else 3 if first < 0xF0 else 4
            end = start if start <= len(data) else end
        text = data[self.num_shown : end].decode()
        self.num_shown = end
        return text

    def finish(self):
        return b"".join(self.vocab[i] for i in self.token_ids)[self.num_shown :].decode(errors="replace")
