"""`LLM`: prompts in, answers out, all at once (`generate`, `chat`) or as they grow (`stream`).

It turns prompts into requests and steps the engine until all are finished. `LLMEngine` does the work, also for a loop
of your own.
"""

import sys
from collections.abc import Collection, Generator, Iterator
from contextlib import closing, suppress
from dataclasses import fields
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, NoReturn

from tqdm import tqdm

from nanovllm.config import Config
from nanovllm.engine import LLMEngine
from nanovllm.one_thread import InUseError
from nanovllm.prompts import ChatPrompt, Message, Prompt, conversations_of, is_single_prompt, render_conversation
from nanovllm.request import RequestOutput
from nanovllm.sampling_params import SamplingParams

Prompts = Prompt | Collection[Prompt]
Params = SamplingParams | Collection[SamplingParams] | None
"""One for all prompts, a list with one for each, or None for the defaults."""
Messages = Collection[Message] | Collection[Collection[Message]]
"""One conversation, or a list of them."""
Requests = dict[str, tuple[Any, ...]]
"""Request id -> arguments of `add_request`: the encoded prompt, and parameters."""


class LLM:
    """`LLM(model, **options)`: the options are the fields of `Config`.

    >>> llm = LLM(TINY_QWEN3)
    >>> llm.chat([{"role": "user", "content": "What is a block table?"}])[0].outputs[0].text
    """

    def __init__(self, model: str | Path, **options: Any) -> None:
        self.engine = self.make_engine(model, options)
        self._request_ids = count()
        self._abandoned: list[Generator[object, None, None]] = []  # streams whose requests are still to be aborted

    def __reduce__(self) -> NoReturn:
        raise TypeError("an LLM cannot be copied or pickled, for another process for example: make one in each process")

    def make_engine(self, model: str | Path, options: dict[str, Any]) -> LLMEngine:
        known = {one.name for one in fields(Config)}
        if unknown := [name for name in options if name not in known]:
            raise TypeError(f"nanovllm.LLM has no option {unknown[0]!r}; nanovllm_extras.LLM has more options")
        return LLMEngine(Config(model, **options))

    def generate(self, prompts: Prompts, sampling_params: Params = None, use_tqdm: bool = True) -> list[RequestOutput]:
        """Complete all prompts, and return the outputs in their order.

        prompts: one prompt or a list of them. A prompt is a str, a list of token ids, `{"prompt": str}` or
            `{"prompt_token_ids": list}`.
        sampling_params: one for all prompts, a list with one for each, or None for the defaults.
        use_tqdm: whether to show a progress bar.
        Raises TypeError or ValueError, before anything is queued, if a prompt or a parameter is bad, and RuntimeError
        while a stream is unfinished.
        """
        is_shown = use_tqdm and sys.stderr is not None  # a program without a terminal may have none
        return self._complete(self._check(prompts, sampling_params), partial(tqdm, disable=not is_shown))

    def stream(self, prompts: Prompts, sampling_params: Params = None) -> Iterator[RequestOutput]:
        """Like `generate`, but yield each request's output whenever it has grown; `finished` is True on the last.

        Each `outputs[i].text` is a prefix of the next one. Closing the iterator early aborts the unfinished requests.
        Until it is finished or closed, other calls raise RuntimeError.
        """
        return self._stream(self._check(prompts, sampling_params))

    def chat(self, messages: Messages, sampling_params: Params = None, use_tqdm: bool = True) -> list[RequestOutput]:
        """Answer one conversation, or each of a list. A message is `{"role": "user", "content": "…"}`."""
        return self.generate(self.render_chat(messages), sampling_params, use_tqdm)

    def render_chat(self, messages: Messages) -> list[ChatPrompt]:
        """Return conversations as prompts, made by the model's chat template, for `generate` and `stream`."""
        tokenizer = self.engine.tokenizer
        return [render_conversation(tokenizer, one, add_generation_prompt=True) for one in conversations_of(messages)]

    def _complete(self, requests: Requests, make_bar: Any) -> list[Any]:
        """Return the last output of each request, in their order."""
        finished: dict[str, RequestOutput] = {}
        with (
            self.engine.one_thread.use(),
            make_bar(total=len(requests), desc="Generating", unit="req") as bar,
            closing(self._stream(requests, stream=False)) as outputs,
        ):
            for output in outputs:
                finished[output.request_id] = output
                bar.update()
        return [finished[request_id] for request_id in requests]

    def _check(self, prompts: Any, params: object) -> Requests:
        """Return requests that can be served. Raises if one of them cannot."""
        prompts = [prompts] if is_single_prompt(prompts) else list(prompts)
        params = spread("sampling_params", params, SamplingParams, None, len(prompts))
        requests: Requests = {}
        with self.engine.one_thread.use():
            for prompt, one in zip(prompts, params, strict=True):
                text, token_ids = self.engine.encode(prompt)
                encoded = {"prompt": text, "prompt_token_ids": token_ids}
                requests[str(next(self._request_ids))] = encoded, self.engine.check_params(one)
        return requests

    def _stream(self, requests: Requests, stream: bool = True) -> Generator[Any, None, None]:
        """Yield `_outputs`, and let other calls use the engine only while the consumer has an output.

        Raises InUseError if another thread uses the engine, or has a stream that is unfinished.
        """
        outputs, one_thread = self._outputs(requests, stream), self.engine.one_thread
        try:
            while True:
                with one_thread.use(outputs):
                    self._close_abandoned()
                    output = next(outputs, None)
                if output is None:
                    return
                yield output
        finally:
            one_thread.end(outputs)
            self._abandoned.append(outputs)
            with suppress(InUseError), one_thread.use():  # garbage may be collected in any thread, during any step
                self._close_abandoned()

    def _close_abandoned(self) -> None:
        """Abort the requests of streams that were closed while the engine was in use."""
        while self._abandoned:
            self._abandoned.pop().close()

    def _step_engine(self) -> list[Any]:
        """Advance all requests that a consumer still waits for."""
        self._close_abandoned()
        return self.engine.step()

    def _outputs(self, requests: Requests, stream: bool) -> Generator[Any, None, None]:
        """Queue the requests when the first output is asked for, step until all are finished, and yield the outputs.

        However it ends, none of its requests stays in the engine. Raises RuntimeError if the engine has unfinished
        requests of another call, such as a paused stream: this call would take their outputs.
        """
        if self.engine.has_unfinished_requests():
            raise RuntimeError("the engine has unfinished requests of another call: finish or close that stream, or "
                               "drop its requests by llm.engine.reset(), and call again")  # fmt: skip
        unfinished = set(requests)
        try:
            for request_id, arguments in requests.items():
                self.engine.add_request(request_id, *arguments, stream=stream)
            while unfinished:
                if not unfinished & self.engine.requests.keys():
                    raise RuntimeError(f"requests {sorted(unfinished)} are not in the engine any more")
                for output in self._step_engine():
                    unfinished -= {output.request_id} if output.finished else set()
                    yield output
        finally:
            for request_id in requests:
                self.engine.abort_request(request_id)  # those that have finished are unknown to the engine


def spread(name: str, value: object, kind: type, default: Any, num_prompts: int) -> list[Any]:
    """Expand one value, a list, or None (the default) to a list with one entry per prompt."""
    if value is None:
        return [default] * num_prompts
    if isinstance(value, kind) and not isinstance(value, bool):
        return [value] * num_prompts
    if not isinstance(value, list | tuple) or not all(isinstance(one, kind) for one in value):
        raise TypeError(f"{name} must be a {kind.__name__}, a list of them, or None, got {value!r}")
    if len(value) != num_prompts:
        raise ValueError(f"there must be one {name} for each prompt, got {len(value)} for {num_prompts} prompts")
    return list(value)
