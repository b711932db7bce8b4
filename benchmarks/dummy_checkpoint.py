"""Make a folder with Qwen3-0.6B's config.json and a tokenizer of the same size, for servers with dummy weights.

    python -m benchmarks.dummy_checkpoint FOLDER

The tokens are the 256 bytes and combinations of up to three printable characters, 151,643 in all. So detokenization
costs as much as with the real tokenizer, and nothing is downloaded.
"""

import argparse
import itertools
import shutil
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from benchmarks.common import QWEN3_06B

NUM_TOKENS = 151_643  # of Qwen3's tokenizer, without its special tokens


def main() -> None:
    parser = argparse.ArgumentParser(description="Make a folder that servers can load with dummy weights.")
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    make_tokenizer(NUM_TOKENS).save_pretrained(folder)
    shutil.copy(QWEN3_06B / "config.json", folder)
    print(f"written to {folder}")


def make_tokenizer(num_tokens: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE: bytes, then pairs of printable characters, then three of them, until there are enough."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    letters = [letter for letter in alphabet if letter.isascii()]
    pairs = [(a, b) for a, b in itertools.product(letters, letters)]
    triples = [(a + b, c) for a, b in pairs for c in letters]
    merges = (pairs + triples)[: num_tokens - len(alphabet)]
    vocab = {token: i for i, token in enumerate([*alphabet, *(a + b for a, b in merges)])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>")


if __name__ == "__main__":
    main()
