"""Compile a schema, expression or grammar to a `Grammar` with llguidance (https://github.com/guidance-ai/llguidance).

llguidance combines a parser over bytes with a trie of the tokenizer's tokens. It finds the allowed next tokens without
a table for each state of the grammar, so a compilation takes about a millisecond (measurements:
`docs/structured_outputs.md`). `input_processor.py` calls the compiler when a request is added. The trie is built at the
first such request.
"""

import json
import threading
from collections import OrderedDict
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from types import ModuleType
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from nanovllm_extras.options.request_params import SamplingParams
from nanovllm_extras.options.structured_params import StructuredOutputsParams, schema_text
from nanovllm_extras.requests.full_detokenizer import TokenDecoder
from nanovllm_extras.structured.closed_objects import closed_text
from nanovllm_extras.structured.first_space import FirstSpace, after_space, hides_first_space
from nanovllm_extras.structured.grammar import Grammar, MaskWorker, end_failed, fill_masks

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer
    from transformers import PreTrainedTokenizerFast

MAX_COMPILED = 128  # compiled grammars in the cache; the least recently used one is evicted first
MAX_CHARS = 1 << 20
MAX_KEPT = 1 << 18  # characters of the grammars in the cache; each takes up to 600 bytes in compiled form
# The library's compilers are recursive: thousands of nested brackets or chained rules would overflow the stack.
MAX_NESTING = 100  # brackets open at the same time in a grammar; the library has its own limit for JSON
MAX_RULES = 1000  # rules in a grammar, and references in a schema
# Without a limit on white space, a model could generate blanks until `max_tokens`. `lenient` would ignore unknown
# keywords of a schema.
JSON_OPTIONS = {"whitespace_pattern": r"[ \n\r\t]{1,32}", "lenient": False}


class Compiled(NamedTuple):
    """A compiled grammar in the cache."""

    matcher: "LLMatcher"
    """The library's matcher in its initial state."""
    first_space: FirstSpace | None
    """What constrains outputs whose first space is not shown, if the tokenizer removes it."""
    num_chars: int
    """The length of the text that was compiled."""


class GrammarCompiler:
    """Compiles grammars for one tokenizer and one set of end tokens. It may be called from several threads.

    vocab_size: the model's, which may be larger than the tokenizer's.
    """

    _llguidance: ModuleType  # once it has been imported
    _ll_tokenizer: "LLTokenizer"
    ending = staticmethod(end_failed)
    """Ends the samples of a request whose grammar has failed."""

    def __init__(self, tokenizer: "PreTrainedTokenizerFast", vocab_size: int, eos_token_ids: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._lock = threading.Lock()
        self._compiled: OrderedDict[tuple[str, ...], Compiled] = OrderedDict()  # by source
        self._probe: list[int] = []  # the tokens of " a"
        self._starts: np.ndarray | None = None  # see `FirstSpace`; None if the tokenizer shows the first space
        self._worker: MaskWorker | None = None

    def compile(self, params: StructuredOutputsParams | Mapping[str, object]) -> Grammar:
        """Return a grammar in its initial state.

        Raises ValueError if `params` cannot be compiled, or if this model's tokens cannot form a matching text.
        """
        params = StructuredOutputsParams.of(params)
        params.check()
        source = source_of(params)
        with self._lock:
            self._start()
            compiled = self._compiled.get(source)
        if compiled is None:  # outside the lock, so that a long compilation does not block other threads
            form, text, options = source
            text = checked(form, text)
            compiled = Compiled(*self._make_matchers(form, text, options), len(text))
        with self._lock:
            self._compiled[source] = compiled
            self._compiled.move_to_end(source)
            while len(self._compiled) > MAX_COMPILED or self._num_kept_chars() > MAX_KEPT:
                self._compiled.popitem(last=False)
            assert self._worker is not None
            return Grammar(compiled.matcher, self._eos_token_ids, self._worker, compiled.first_space).copy()

    def for_prompt(
        self, grammar: Grammar, decoder: TokenDecoder, params: SamplingParams, prompt_token_ids: list[int]
    ) -> Grammar:
        """Return the grammar of an output that follows `prompt_token_ids`."""
        shows_all = grammar.first_space is None or not hides_first_space(decoder, self._probe, params, prompt_token_ids)
        return grammar.copy(keeps_first_space=shows_all)

    def _num_kept_chars(self) -> int:
        """Return the number of characters of all grammars in the cache except the newest."""
        *others, _ = self._compiled.values()
        return sum(one.num_chars for one in others)

    def _start(self) -> None:
        """Import the library, and build its trie of the tokenizer's tokens."""
        if self._worker is not None:
            return
        if not self._eos_token_ids:
            raise ValueError("structured_outputs needs a model with an end-of-sequence token, but this model has none")
        try:
            import llguidance
        except ImportError as error:
            raise ValueError(
                f"structured_outputs needs the package llguidance ({error}): pip install 'nanovllm[structured]'"
            ) from None
        text, num_ids = without_holes(self._tokenizer)
        num_tokens = max(self._vocab_size, num_ids)
        try:
            self._ll_tokenizer = llguidance.LLTokenizer(text, n_vocab=num_tokens, eos_token=sorted(self._eos_token_ids))
            check_decoder(self._tokenizer)
        except ValueError as error:
            raise ValueError(f"structured_outputs cannot use the tokenizer of this model: {error}") from None
        self._llguidance = llguidance
        self._probe = probe = self._ll_tokenizer.tokenize_bytes(b" a")
        has_space = self._ll_tokenizer.decode_bytes(probe) == b" a"  # otherwise no token has a space
        if has_space and hides_first_space(TokenDecoder(self._tokenizer), probe, SamplingParams(), []):
            spaced = self._compile("regex", llguidance.LLMatcher.grammar_from_regex(" (?s:.*)"))
            self._starts = np.frombuffer(spaced.compute_bitmask(), dtype=np.uint32)
        pool = ThreadPoolExecutor(1, thread_name_prefix="grammar-masks")
        self._worker = MaskWorker(pool, llguidance.LLExecutor(), -(-num_tokens // 32))

    def _make_matchers(self, form: str, text: str, options: str) -> "tuple[LLMatcher, FirstSpace | None]":
        """Return a matcher in its initial state, and another for outputs whose first space is not shown.

        Raises ValueError if the text is invalid, or allows no first token.
        """
        library = self._llguidance
        try:
            if form == "json":
                compiled = library.LLMatcher.grammar_from_json_schema(text, overrides=json.loads(options))
            elif form == "regex":
                compiled = library.LLMatcher.grammar_from_regex(text)
            elif form == "choice":
                compiled = library.LLMatcher.grammar_from_lark(text)
            else:
                compiled = library.grammar_from("grammar", text)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"structured_outputs.{form} cannot be compiled: {error}") from None
        matcher = self._compile(form, compiled)
        assert self._worker is not None
        first = Grammar(matcher.deep_copy(), self._eos_token_ids, self._worker)
        mask = np.zeros((1, self._worker.num_words), dtype=np.int32)
        fill_masks(self._worker, [first], [[]], [self._eos_token_ids], mask)
        if first.error:
            raise ValueError(f"structured_outputs.{form} cannot be satisfied by this model's tokens: {first.error}")
        if self._starts is None:
            return matcher, None
        return matcher, FirstSpace(self._compile(form, after_space(compiled)), self._starts)

    def _compile(self, form: str, grammar: str) -> "LLMatcher":
        """Return a matcher of the library's `grammar` in its initial state. Raises ValueError if it is invalid."""
        limits = self._llguidance.LLParserLimits(verbose_errors=False)
        matcher = self._llguidance.LLMatcher(self._ll_tokenizer, grammar, log_level=0, limits=limits)
        if matcher.is_error():
            raise ValueError(f"structured_outputs.{form} cannot be compiled: {matcher.get_error().strip()}")
        return matcher


def check_decoder(tokenizer: "PreTrainedTokenizerFast") -> None:
    """Raise ValueError if the library reads other texts from tokens than the decoder of the tokenizer writes."""
    decoder = tokenizer.backend_tokenizer.decoder
    if decoder is not None and b"Metaspace" in decoder.__getstate__():  # the library would take "▁" for a letter
        raise ValueError("its decoder must write spaces by Replace or ByteLevel, got Metaspace")


def without_holes(tokenizer: "PreTrainedTokenizerFast") -> tuple[str, int]:
    """Return a fast tokenizer as JSON, and its largest token id + 1.

    Ids may have holes, but the library reads as many ids as there are tokens. So special tokens, which match no text,
    fill the holes.
    """
    backend = copy(tokenizer.backend_tokenizer)
    backend.no_padding()
    backend.no_truncation()
    # the library encodes texts that continue an output
    text = backend.to_str().replace('"add_prefix_space":true', '"add_prefix_space":false')
    known = set(tokenizer.get_vocab().values())
    num_ids = max(known) + 1
    if num_ids == len(known):
        return text, num_ids
    parts = json.loads(text)
    for token_id in set(range(num_ids)) - known:
        content = f"<nothing {token_id}>"
        parts["model"]["vocab"][content] = token_id
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        parts["added_tokens"].append({"id": token_id, "content": content, **flags, "special": True})
    parts["added_tokens"].sort(key=lambda token: token["id"])
    return json.dumps(parts), num_ids


def source_of(params: StructuredOutputsParams) -> tuple[str, str, str]:
    """Return the key of the cache, (form, text, options). It is computed for each look-up, so it must be cheap."""
    if params.json is not None or params.json_object:
        text = schema_text({"type": "object"} if params.json is None else params.json)
        return "json", text, json.dumps(whitespace_options(params))
    if params.regex is not None:
        return "regex", params.regex, ""
    if params.choice is not None:
        return "choice", "start: " + " | ".join(map(json.dumps, params.choice)), ""
    assert params.grammar is not None
    return "grammar", params.grammar, ""


def checked(form: str, text: str) -> str:
    """Return the text to compile for a form's text. Raises ValueError if it exceeds a limit."""
    check_size(form, text)
    if form == "json":
        text = closed_text(check_references(text))
        return check_size(form, check_references(text))  # check again: closing may have copied references
    return check_grammar(text) if form == "grammar" else text


def whitespace_options(params: StructuredOutputsParams) -> dict[str, object]:
    """Return the library's options for a JSON schema."""
    if params.disable_any_whitespace:
        return JSON_OPTIONS | {"whitespace_pattern": None, "whitespace_flexible": False}
    if params.whitespace_pattern is not None:
        return JSON_OPTIONS | {"whitespace_pattern": params.whitespace_pattern}
    return JSON_OPTIONS


def check_size(form: str, text: str) -> str:
    """Return `text`. Raises ValueError if it is too long."""
    if len(text) > MAX_CHARS:
        raise ValueError(f"structured_outputs.{form} must have at most {MAX_CHARS} characters, got {len(text)}")
    return text


def check_references(text: str) -> str:
    """Return `text`, a schema. Raises ValueError if it has too many references."""
    check_count("json", "references", text.count('"$ref"'))
    return text


def check_grammar(text: str) -> str:
    """Return a grammar without blank lines. Raises ValueError if it has too many rules or too deep nesting.

    The library detects the syntax in a time that is quadratic in the number of blank lines. Each rule starts a line and
    has a colon. Escapes are counted too, because they may hide references of the schemas in a grammar.
    """
    text = "\n".join(line for line in text.split("\n") if line.strip())
    num_rules = sum(":" in line for line in text.splitlines())
    check_count("grammar", "rules and references", num_rules + text.count("$ref") + text.count("\\u"))
    depth = deepest = 0
    for char in text:
        depth += (char in "([{") - (char in ")]}")
        deepest = max(deepest, depth)
    if deepest > MAX_NESTING:
        raise ValueError(f"structured_outputs.grammar must nest at most {MAX_NESTING} brackets, got {deepest}")
    return text


def check_count(form: str, what: str, count: int) -> None:
    """Raise ValueError if `count` is larger than `MAX_RULES`."""
    if count > MAX_RULES:
        raise ValueError(f"structured_outputs.{form} must have at most {MAX_RULES} {what}, got {count}")
