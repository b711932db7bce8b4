"""Compute the result of one request from the bytes of its answer and their arrival times.

TTFT = first token − sent. ITL = each gap between two chunks with tokens. TPOT = (last − first) ÷ (tokens − 1).
E2E = last − sent. "First" and "last" are the arrival times of the first and the last chunk with tokens.
If a server sends several tokens in a chunk, there are fewer and longer gaps: ITL is the rate that a user sees, and TPOT
is the mean.
"""

import itertools
import json
from dataclasses import dataclass, field

from nanovllm_extras.bench.load_generator import Exchange
from nanovllm_extras.machine.event_stream import DONE, Choice, EventReader, Usage


@dataclass
class Result:
    """The result of one request. Times are in seconds."""

    sent: float
    lag: float = 0.0
    """The delay after the request's departure time: by the load generator, or by `max_concurrency`."""
    error: str | None = None
    """The reason why the request has failed, or None."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    """The number in the server's usage; without usage, the number of chunks."""
    has_usage: bool = False
    chunk_times: list[float] = field(default_factory=list)
    """The arrival times of the chunks with tokens."""
    text: str = ""

    @property
    def end(self) -> float:
        return self.chunk_times[-1] if self.chunk_times else self.sent

    @property
    def ttft(self) -> float:
        return self.chunk_times[0] - self.sent

    @property
    def tpot(self) -> float | None:
        """The mean time per token after the first; None for a single token."""
        if self.output_tokens < 2:
            return None
        return (self.chunk_times[-1] - self.chunk_times[0]) / (self.output_tokens - 1)

    @property
    def itls(self) -> list[float]:
        return [later - earlier for earlier, later in itertools.pairwise(self.chunk_times)]

    @property
    def e2el(self) -> float:
        return self.end - self.sent


def read_result(exchange: Exchange, num_sent_tokens: int) -> Result:
    """Return the result of an exchange. num_sent_tokens: tokens of the prompt, used if the server sends no usage."""
    result = Result(exchange.sent, exchange.sent - exchange.due, exchange.error, num_sent_tokens)
    if result.error is None and exchange.status != 200:
        body = b"".join(data for _, data in exchange.reads).decode(errors="replace")
        result.error = f"HTTP {exchange.status}: {body[:300]}"
    if result.error is None:
        result.error = read_stream(exchange, result)
    return result


def read_stream(exchange: Exchange, result: Result) -> str | None:
    """Parse the stream of an answer into `result`. Return the error of the stream, or None."""
    reader, finished = EventReader(), 0.0
    for arrived, data in exchange.reads:
        for event in reader.feed(data):
            if event == DONE:
                break
            try:
                chunk = json.loads(event)
            except ValueError:
                return f"an event is not JSON: {event[:300]}"
            if not isinstance(chunk, dict) or "error" in chunk:
                return f"error in the stream: {event[:300]}"
            read_usage(chunk.get("usage"), result)
            for choice in chunk.get("choices") or []:
                finished = arrived if choice.get("finish_reason") is not None else finished
                read_choice(choice, arrived, result)
    if result.output_tokens and finished and not result.chunk_times:
        result.chunk_times.append(finished)  # some servers report tokens without text only at the end
    if not result.chunk_times:
        return "the stream contained no tokens"
    if not result.has_usage:
        result.output_tokens = len(result.chunk_times)
    return None if finished else "the stream ended before the answer"


def read_choice(choice: Choice, arrived: float, result: Result) -> None:
    """Add the text and the arrival time of a chunk with tokens. Skip chunks with only the role or the finish reason.

    A chunk may contain a token but no text, because a character can consist of several tokens.
    """
    delta = choice.get("delta", choice)
    text = "".join(text for text in (delta.get("text"), delta.get("content"), delta.get("reasoning")) if text)
    is_bare = not text and not delta.get("reasoning_content") and not delta.get("tool_calls")
    if is_bare and ("role" in delta or choice.get("finish_reason") is not None):
        return
    result.text += text
    result.chunk_times.append(arrived)


def read_usage(usage: Usage | None, result: Result) -> None:
    """Store the numbers of tokens in `result`."""
    if not usage:
        return
    result.has_usage = True
    result.prompt_tokens = usage.get("prompt_tokens") or 0
    result.output_tokens = usage.get("completion_tokens") or 0
    result.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
