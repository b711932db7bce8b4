"""Hold the turns of a conversation, and the costs of its answers."""

import re
from dataclasses import dataclass, field

Message = dict[str, str]

THINK_START, THINK_END = "<think>", "</think>"
REASONING = re.compile(rf"{THINK_START}.*?(?:{THINK_END}|\Z)", re.DOTALL)  # an interrupted answer may not end it


class TaggedText:
    """An answer that is received in parts, as one text: reasoning is between `<think>` tags."""

    def __init__(self) -> None:
        self.text = ""
        self._is_reasoning = False

    def add(self, text: str, is_reasoning: bool) -> None:
        if not text:
            return
        if is_reasoning != self._is_reasoning:
            self.text += THINK_START if is_reasoning else THINK_END
            self._is_reasoning = is_reasoning
        self.text += text


def without_reasoning(message: Message) -> Message:
    """Return a message without the reasoning that `TaggedText` has put between tags."""
    return {**message, "content": REASONING.sub("", message["content"])} if message["role"] == "assistant" else message


@dataclass(frozen=True)
class Cost:
    """The cost of one answer. Times are in seconds, measured in the terminal."""

    prompt_tokens: int
    """The number of tokens of the whole conversation, rendered by the chat template."""
    cached_tokens: int
    """The number of `prompt_tokens` that were found in the prefix cache."""
    output_tokens: int
    ttft_s: float
    """The time from the question to the first token."""
    duration_s: float
    """The time from the question to the last token."""
    finish_reason: str | None
    """`stop`, `length`, …; None for an answer that was interrupted."""

    @property
    def tokens_per_second(self) -> float:
        """The rate after the first token; 0 if there is only one token."""
        gaps = self.duration_s - self.ttft_s
        return (self.output_tokens - 1) / gaps if gaps > 0 else 0.0

    def __str__(self) -> str:
        parts = [
            f"{self.cached_tokens} of {self.prompt_tokens} prompt tokens from the prefix cache",
            f"first token {1e3 * self.ttft_s:,.0f} ms",
            f"{self.output_tokens} tokens",
        ]
        if self.tokens_per_second:
            parts.append(f"{self.tokens_per_second:,.0f} tokens/s")
        if self.finish_reason != "stop":
            parts.append("interrupted" if self.finish_reason is None else f"cut: {self.finish_reason}")
        return " · ".join(parts)


@dataclass
class Conversation:
    """The turns of user and assistant after a system prompt, which may be empty. Costs are kept for the session."""

    system: str = ""
    turns: list[Message] = field(default_factory=list)
    costs: list[Cost] = field(default_factory=list)

    @property
    def messages(self) -> list[Message]:
        """The system prompt and all turns."""
        return [*([{"role": "system", "content": self.system}] if self.system else []), *self.turns]

    def ask(self, question: str) -> list[Message]:
        """Return the messages to answer. The question is stored only by `keep`."""
        return [*self.messages, {"role": "user", "content": question}]

    def keep(self, question: str, answer: str, cost: Cost | None) -> None:
        """Store a turn and its cost. If the answer is empty, store only the cost."""
        if cost is not None:
            self.costs.append(cost)
        if answer:
            self.turns += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]

    def reset(self) -> None:
        """Remove all turns. The system prompt stays."""
        self.turns.clear()

    def restore(self, messages: list[Message]) -> None:
        """Replace the system prompt and all turns by those of `messages`, which are at least one."""
        has_system = messages[0]["role"] == "system"
        self.system = messages[0]["content"] if has_system else ""
        self.turns = messages[has_system:]

    def describe(self) -> dict[str, str]:
        """Return the costs of the session so far, for `/stats`."""
        prompt_tokens = sum(cost.prompt_tokens for cost in self.costs)
        cached_tokens = sum(cost.cached_tokens for cost in self.costs)
        share = cached_tokens / prompt_tokens if prompt_tokens else 0.0
        return {
            "answers": str(len(self.costs)),
            "tokens read": f"{prompt_tokens:,}, {cached_tokens:,} of them from the prefix cache ({share:.0%})",
            "tokens written": f"{sum(cost.output_tokens for cost in self.costs):,}",
        }
