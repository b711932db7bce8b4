"""Small tokenizers made on the spot: byte-level BPE, and pieces with a prefix space as SentencePiece has them.

They fit into the vocabulary of 300 that the random checkpoints have.
"""

import json
import shutil

import tokenizers
import transformers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

TEXTS = ["Hello there", "Paged attention keeps K and V in blocks.", "a", "naïve café ☕"]
BYTE_LEVEL_SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]  # ids 0, 1, 2
PIECES = ["▁", "▁▁", "▁Hel", "lo", "▁wor", "ld", "▁a", "▁b", "a", "b", "c", "é", "ée", ".", "'s", "\n"]


def byte_level(add_prefix_space=False):
    """A byte in a token, twelve merges, three special tokens; <|im_end|> is the end token."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=len(BYTE_LEVEL_SPECIALS) + 256 + 12,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=BYTE_LEVEL_SPECIALS,
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS * 3, trainer)
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )


def sentencepiece(pieces=PIECES, shows_first_space=False):
    """As Llama 2's: ▁ is a space, the first one is not shown, and what no piece has is spelled in bytes.

    With `shows_first_space` as Gemma's.
    """
    tokens = ["<unk>", "<s>", "</s>", *[f"<0x{byte:02X}>" for byte in range(256)], *pieces]
    vocab = {token: i for i, token in enumerate(tokens)}
    model = models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    strip = [] if shows_first_space else [decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )


def metaspace():
    """As T5's: ▁ is a space, the first one is not shown; no bytes."""
    tokens = ["<pad>", "</s>", "<unk>", *PIECES]
    vocab = {token: i for i, token in enumerate(tokens)}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", pad_token="<pad>", eos_token="</s>"
    )


def copy_checkpoint(folder, target, tokenizer=None, **generation_config):
    """The checkpoint once more, with a tokenizer and with a generation_config.json of these fields."""
    shutil.copytree(folder, target)
    if tokenizer is not None:
        tokenizer.save_pretrained(target)
    (target / "generation_config.json").write_text(json.dumps(generation_config))
    return target
