"""Get answers from an engine in this process, or from a server.

Both yield the growing text of an answer and its cost. If the iterator is closed early, for example by Ctrl-C, the
request is aborted: the engine frees its blocks immediately, a server when the connection closes.
"""

import contextlib
import dataclasses
import json
import re
import time
from collections.abc import Generator, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import httpx

from nanovllm_extras.full_llm import LLM
from nanovllm_extras.machine.event_stream import DONE, Chunk, Delta, EventReader, Usage
from nanovllm_extras.terminal.chat_history import Cost, Message, TaggedText, without_reasoning
from nanovllm_extras.terminal.local_reasoning import ReasoningReader, sampling_fields
from nanovllm_extras.terminal.saved_conversations import SavedConversations
from nanovllm_extras.vllm.engine_args import EngineArgs

FAILURES = (httpx.HTTPError, httpx.InvalidURL)
SAMPLE = re.compile(r"^(?:\w+:)(\w+)(?:\{[^}]*\})? ([-+.\w]+)", re.MULTILINE)  # prefix:name{label="…"} value


class Answer(NamedTuple):
    """The state of a growing answer."""

    text: str
    """The whole text so far."""
    cost: Cost | None
    """The cost so far; None while it is unknown."""


class AnswerError(Exception):
    """Raised if a question cannot be answered. Other questions may still be answered."""


class Answerer(Protocol):
    """A source of answers."""

    name: str

    def answer(self, messages: list[Message]) -> Generator[Answer, None, None]:
        """Yield the answer while it grows. Raises AnswerError."""

    def describe(self) -> dict[str, str]:
        """Return the state of the engine or server, for `/stats`."""

    @property
    def saved(self) -> SavedConversations:
        """Return the conversations that can be saved and restored. Raises AnswerError or ValueError if none can."""


class LocalAnswerer:
    """Gets answers from an engine in this process.

    sampling: fields of `SamplingParams` that override the defaults.
    """

    def __init__(self, engine_args: EngineArgs, sampling: Mapping[str, Any]) -> None:
        model = Path(engine_args.model)
        self.name = model.name if model.is_dir() else str(model)
        self._llm = LLM.from_engine_args(engine_args)
        default = self._llm.get_default_sampling_params()
        self._parser = engine_args.reasoning_parser
        needed = sampling_fields(self._parser, self._llm.get_tokenizer())
        self._params = dataclasses.replace(default, **{"max_tokens": None, **needed, **sampling})

    def answer(self, messages: list[Message]) -> Generator[Answer, None, None]:
        start = time.perf_counter()
        try:
            prompts = self._llm.render_chat([without_reasoning(one) for one in messages])
            stream = self._llm.stream(prompts, self._params)
        except ValueError as error:  # for example, the conversation is too long
            raise AnswerError(str(error)) from error
        reader, ttft = ReasoningReader(self._parser, self._llm.get_tokenizer(), prompts[0]), None
        with contextlib.closing(stream):
            for output in stream:
                duration = time.perf_counter() - start
                ttft = ttft or duration
                completion = output.outputs[0]
                counts = len(output.prompt_token_ids), output.num_cached_tokens, len(completion.token_ids)
                yield Answer(reader.read(completion), Cost(*counts, ttft, duration, completion.finish_reason))

    def describe(self) -> dict[str, str]:
        stats = self._llm.get_stats()
        return {
            "engine": self._llm.engine.description,
            "KV blocks": f"{stats.num_kv_blocks:,}, {stats.num_free_blocks:,} of them free or cached",
            "prefix cache": f"{stats.prefix_cache_hit_rate:.0%} of the prompt tokens were hits",
            "steps": f"{stats.steps:,}",
        }

    @property
    def saved(self) -> SavedConversations:
        return SavedConversations(self._llm)


class ServerAnswerer:
    """Gets answers from an OpenAI-compatible server.

    url: with or without `/v1`. model: None selects the first model that the server lists.
    """

    def __init__(self, url: str, model: str | None, api_key: str | None, sampling: Mapping[str, object]) -> None:
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._url = url.rstrip("/").removesuffix("/v1")
        # no read timeout: a server may compute a long prompt for minutes before it sends anything
        self._client = httpx.Client(headers=headers, timeout=httpx.Timeout(10, read=None))
        self._sampling = sampling
        self.name = model or self._first_model()

    def answer(self, messages: list[Message]) -> Generator[Answer, None, None]:
        sent = [without_reasoning(one) for one in messages]
        body = {"model": self.name, "messages": sent, **self._sampling}
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        try:
            with self._client.stream("POST", f"{self._url}/v1/chat/completions", json=body) as response:
                if response.status_code != 200:
                    raise AnswerError(read_error(response.status_code, response.read().decode(errors="replace")))
                yield from GrowingAnswer().read(response.iter_raw())
        except FAILURES as error:
            raise AnswerError(f"{self._url}: {error}") from error

    def describe(self) -> dict[str, str]:
        try:
            response = self._client.get(f"{self._url}/metrics")
        except FAILURES as error:
            return {"server": str(error)}
        return {"server": self._url, **(read_server_stats(response.text) if response.status_code == 200 else {})}

    @property
    def saved(self) -> SavedConversations:
        raise AnswerError("conversations are saved by an engine in this process: leave out --url")

    def _first_model(self) -> str:
        try:
            response = self._client.get(f"{self._url}/v1/models")
            if response.status_code != 200:
                raise AnswerError(read_error(response.status_code, response.text))
            return response.json()["data"][0]["id"]
        except (*FAILURES, ValueError, LookupError, TypeError) as error:
            raise AnswerError(f"{self._url}/v1/models does not list a model: {error}") from error


class GrowingAnswer:
    """Combines the chunks of a stream to an answer. Servers send reasoning separately."""

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self._ttft: float | None = None
        self._tagged = TaggedText()
        self._finish_reason: str | None = None
        self._usage: Usage = {}

    def read(self, body: Iterator[bytes]) -> Iterator[Answer]:
        """Read a stream, and yield the answer after each chunk. Raises AnswerError."""
        reader = EventReader()
        for data in body:
            for event in reader.feed(data):
                if event != DONE:
                    self._read_chunk(json.loads(event))
                    yield Answer(self._tagged.text, None)
        if self._finish_reason is None:
            raise AnswerError("the server closed the connection before the end of the answer")
        yield Answer(self._tagged.text, self._cost())

    def _read_chunk(self, chunk: Chunk) -> None:
        if "error" in chunk:
            raise AnswerError(str(chunk["error"].get("message", chunk["error"])))
        self._usage = chunk.get("usage") or self._usage
        for choice in chunk.get("choices", []):
            delta: Delta = choice.get("delta", {})
            self._add(delta.get("reasoning") or delta.get("reasoning_content"), is_reasoning=True)
            self._add(delta.get("content"), is_reasoning=False)
            self._finish_reason = choice.get("finish_reason") or self._finish_reason

    def _add(self, text: str | None, is_reasoning: bool) -> None:
        if not text:
            return
        if self._ttft is None:
            self._ttft = time.perf_counter() - self._start
        self._tagged.add(text, is_reasoning)

    def _cost(self) -> Cost:
        duration = time.perf_counter() - self._start
        usage, details = self._usage, self._usage.get("prompt_tokens_details")
        num_cached = details.get("cached_tokens") if details else 0
        counts = usage.get("prompt_tokens", 0), num_cached or 0, usage.get("completion_tokens", 0)
        return Cost(*counts, self._ttft or duration, duration, self._finish_reason)


def read_error(status: int, body: str) -> str:
    """Return the message of an error in OpenAI's format, or the body of another error."""
    try:
        return f"{json.loads(body)['error']['message']} (HTTP {status})"
    except (ValueError, LookupError, TypeError):
        return f"HTTP {status}: {body[:300]}"


def read_server_stats(text: str) -> dict[str, str]:
    """Return the load of a server from its `/metrics`: vLLM's names, with any prefix. Missing metrics are omitted."""
    found: dict[str, float] = {}
    for name, value in SAMPLE.findall(text):
        found[name] = found.get(name, 0.0) + float(value)  # add the samples with different labels
    stats = {}
    if "num_requests_running" in found:
        stats["requests"] = (
            f"{found['num_requests_running']:.0f} running, {found.get('num_requests_waiting', 0):.0f} waiting"
        )
    if "kv_cache_usage_perc" in found:
        stats["KV cache"] = f"{found['kv_cache_usage_perc']:.1%} in use"
    if queries := found.get("prefix_cache_queries_total"):
        share = found.get("prefix_cache_hits_total", 0) / queries
        stats["prefix cache"] = f"{share:.0%} of the prompt tokens were hits"
    if "num_preemptions_total" in found:
        stats["preemptions"] = f"{found['num_preemptions_total']:.0f}"
    return stats
