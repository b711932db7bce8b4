"""Python's incremental decoder."""

from codecs import getincrementaldecoder


class Detokenizer:
    def __init__(self, vocab):
        self.vocab = vocab
        self.decoder = getincrementaldecoder("utf-8")("replace")

    def append(self, token_id):
        return self.decoder.decode(self.vocab[token_id])

    def finish(self):
        return self.decoder.decode(b"", final=True)
