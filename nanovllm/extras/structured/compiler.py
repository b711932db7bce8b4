"""A schema, expression or grammar becomes a `Grammar`, by llguidance (https://github.com/guidance-ai/llguidance).

llguidance is a parser over bytes and a trie of the tokenizer's tokens: it finds the tokens that may come next without
a table for each state of the grammar, so a compilation takes about a millisecond (`docs/structured_outputs.md` has
figures). Called by `input_processor.py` when a request is added: nothing is built before the first such request.
"""

import json
import threading
from collections import OrderedDict
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np

from nanovllm.extras.structured.closed_objects import closed_text
from nanovllm.extras.structured.grammar import Grammar, MaskWorker, fill_masks
from nanovllm.extras.structured.structured_params import StructuredOutputsParams, schema_text
from nanovllm.extras.structured.structured_request import StructuredRequest

MAX_COMPILED = 128  # compiled grammars kept, those used longest ago go first
MAX_CHARS = 1 << 20
MAX_KEPT = 1 << 18  # characters of the grammars kept, which take up to 600 bytes each
# The library's compilers are recursive: nesting and chains of rules beyond some thousands would overflow the stack.
MAX_NESTING = 100  # brackets open at the same time in a grammar; the library has a limit of its own for JSON
MAX_RULES = 1000  # in a grammar, and references in a schema
# Without a bound on white space, a model that has lost its way could write blanks for ever. `lenient` is the library's
# name for ignoring what it does not know: never here.
JSON_OPTIONS = {"whitespace_pattern": r"[ \n\r\t]{1,32}", "lenient": False}


class Compiled(NamedTuple):
    matcher: Any
    """At its start."""
    num_chars: int
    """Of the text that was compiled."""


class GrammarCompiler:
    """Compiles for one tokenizer and one set of end tokens. May be called from several threads.

    vocab_size: the model's, which may be larger than the tokenizer's.
    """

    request_class = StructuredRequest

    def __init__(self, tokenizer: Any, vocab_size: int, eos_token_ids: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._lock = threading.Lock()
        self._compiled: OrderedDict[tuple[str, ...], Compiled] = OrderedDict()  # by source
        self._llguidance: Any = None
        self._ll_tokenizer: Any = None
        self._worker: MaskWorker | None = None

    def compile(self, params: StructuredOutputsParams | Mapping[str, Any]) -> Grammar:
        """A grammar at its start. Raises ValueError for what is not one, or what this model cannot spell."""
        params = StructuredOutputsParams.of(params)
        params.check()
        source = source_of(params)
        with self._lock:
            self._start()
            compiled = self._compiled.get(source)
        if compiled is None:  # outside of the lock: a compilation that takes long holds nobody up
            form, text, options = source
            text = checked(form, text)
            compiled = Compiled(self._make_matcher(form, text, options), len(text))
        with self._lock:
            self._compiled[source] = compiled
            self._compiled.move_to_end(source)
            while len(self._compiled) > MAX_COMPILED or self._num_kept_chars() > MAX_KEPT:
                self._compiled.popitem(last=False)
            assert self._worker is not None
            return Grammar(compiled.matcher.deep_copy(), self._eos_token_ids, self._worker)

    def _num_kept_chars(self) -> int:
        """Of all but the newest."""
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
            import llguidance.hf
        except ImportError as error:
            raise ValueError(
                f"structured_outputs needs the package llguidance ({error}): pip install 'nanovllm[structured]'"
            ) from None
        num_tokens = max(self._vocab_size, len(self._tokenizer))
        try:
            self._ll_tokenizer = llguidance.hf.from_tokenizer(
                self._tokenizer, n_vocab=num_tokens, eos_token=sorted(self._eos_token_ids)
            )
        except ValueError as error:
            raise ValueError(f"structured_outputs cannot use the tokenizer of this model: {error}") from None
        self._llguidance = llguidance
        pool = ThreadPoolExecutor(1, thread_name_prefix="grammar-masks")
        self._worker = MaskWorker(pool, llguidance.LLExecutor(), -(-num_tokens // 32))

    def _make_matcher(self, form: str, text: str, options: str) -> Any:
        """A matcher at its start, whose first mask has been computed."""
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
        limits = library.LLParserLimits(verbose_errors=False)
        matcher = library.LLMatcher(self._ll_tokenizer, compiled, log_level=0, limits=limits)
        if matcher.is_error():
            raise ValueError(f"structured_outputs.{form} cannot be compiled: {matcher.get_error().strip()}")
        assert self._worker is not None
        first = Grammar(matcher.deep_copy(), self._eos_token_ids, self._worker)
        mask = np.zeros((1, self._worker.num_words), dtype=np.int32)
        fill_masks(self._worker, [first], [[]], [self._eos_token_ids], mask)
        if first.error:
            raise ValueError(f"structured_outputs.{form} cannot be satisfied by this model's tokens: {first.error}")
        return matcher


def source_of(params: StructuredOutputsParams) -> tuple[str, str, str]:
    """(form, text, options): equal for equal demands. Made anew at each look into the cache, so it does little."""
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
    """What is compiled for a form's text. Raises ValueError for more of it than allowed."""
    check_size(form, text)
    if form == "json":
        text = closed_text(check_references(text))
        return check_size(form, check_references(text))  # which may have copied some
    return check_grammar(text) if form == "grammar" else text


def whitespace_options(params: StructuredOutputsParams) -> dict[str, Any]:
    if params.disable_any_whitespace:
        return JSON_OPTIONS | {"whitespace_pattern": None, "whitespace_flexible": False}
    if params.whitespace_pattern is not None:
        return JSON_OPTIONS | {"whitespace_pattern": params.whitespace_pattern}
    return JSON_OPTIONS


def check_size(form: str, text: str) -> str:
    if len(text) > MAX_CHARS:
        raise ValueError(f"structured_outputs.{form} must have at most {MAX_CHARS} characters, got {len(text)}")
    return text


def check_references(text: str) -> str:
    """text: a schema"""
    check_count("json", "references", text.count('"$ref"'))
    return text


def check_grammar(text: str) -> str:
    """The grammar without blank lines: the library's search for its syntax takes a time quadratic in their number.

    Each rule begins a line and has a colon. Escapes may hide references of the schemas inside a grammar.
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
    if count > MAX_RULES:
        raise ValueError(f"structured_outputs.{form} must have at most {MAX_RULES} {what}, got {count}")
