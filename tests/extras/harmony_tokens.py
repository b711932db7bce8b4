"""A small tokenizer with the special tokens of gpt-oss, and answers written as lists of special tokens and texts."""

import tokenizers
import transformers
from transformers.convert_slow_tokenizer import bytes_to_unicode

from nanovllm_extras.answer_parts.harmony import MARKERS

CORPUS = ["assistant analysis commentary final json to=functions.get_weather in Oslo it is é ☃ 日本語"] * 9


class Marker(str):
    """A special token in an answer that is written as a list; a plain `str` is ordinary text."""


START, CHANNEL, CONSTRAIN, MESSAGE = map(Marker, ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"))
END, CALL, RETURN = map(Marker, ("<|end|>", "<|call|>", "<|return|>"))


def make_tokenizer(vocab=None, merges=None):
    """A byte-level tokenizer with the seven special tokens, trained on a few words if it gets no vocabulary."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, merges))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    if vocab is None:
        alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
        tokenizer.train_from_iterator(
            CORPUS, tokenizers.trainers.BpeTrainer(vocab_size=330, initial_alphabet=alphabet, show_progress=False)
        )
    tokenizer.add_special_tokens(sorted(MARKERS))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|return|>")


TOKENIZER = make_tokenizer()
ORDINARY = tokenizers.Tokenizer.from_str(TOKENIZER.backend_tokenizer.to_str())
ORDINARY.encode_special_tokens = True  # so that special tokens in a text are text


def encode(parts):
    """Token ids of markers and texts. A number is the token of a single byte."""
    ids = []
    for part in parts:
        if isinstance(part, Marker):
            ids.append(TOKENIZER.convert_tokens_to_ids(str(part)))
        elif isinstance(part, int):
            ids.append(TOKENIZER.convert_tokens_to_ids(bytes_to_unicode()[part]))
        else:
            ids += ORDINARY.encode(part).ids
    return ids
