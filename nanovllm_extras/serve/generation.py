"""Run the engine's requests that belong to one HTTP request: start them, read their outputs, and end them.

`chat_route.py` and `completions.py` create a `Generation`, and `streaming.py` closes it. Each request logs a line when
it ends:

    chatcmpl-5f2…-0 stop: 24 tokens in (16 cached), 38 out, first after 3.1 ms, then 1.2 ms each
"""

import logging
import time
from collections.abc import AsyncIterator, Iterable
from functools import partial
from uuid import uuid4

from starlette.requests import Request

from nanovllm.prompts import Prompt
from nanovllm_extras.lora.lora_request import LoRARequest
from nanovllm_extras.options.request_params import SamplingParams
from nanovllm_extras.requests.lazy_outputs import RequestOutput
from nanovllm_extras.serve.async_llm import AsyncLLM
from nanovllm_extras.serve.engine_thread import NewRequest
from nanovllm_extras.serve.errors import APIError, refuse
from nanovllm_extras.serve.inbox import Inbox
from nanovllm_extras.serve.messages.protocol import GenerationRequest
from nanovllm_extras.serve.miss_causes import check_misses
from nanovllm_extras.serve.prompts import check_lengths, salted
from nanovllm_extras.serve.sampling import check_max_tokens
from nanovllm_extras.serve.state import Server

logger = logging.getLogger(__name__)


class Generation:
    """The engine's requests for one HTTP request: one request for each prompt.

    Call `start()`, iterate over `outputs()` or await `finish()`, and call `close()` in the end. `indices` maps the
    engine's name of each request to the index of its prompt.
    """

    def __init__(self, server: Server, request_id: str, prompts: list[Prompt], params: SamplingParams) -> None:
        self.request_id = request_id
        self.created = int(time.time())
        self.indices = {name: i for i, name in enumerate(engine_ids(request_id, len(prompts)))}
        self.latest: dict[str, RequestOutput] = {}
        self.workers = server.workers
        self._server = server
        self._num_new = 0
        self._num_told: dict[str, int] = {}
        self._shows_ids = self._shows_misses = False
        self._prompts = prompts
        self._adapter: LoRARequest | None = None
        self.params = params
        self._arrival_time = time.monotonic()
        self._llm: AsyncLLM | None = None
        self._inbox: Inbox | None = None

    async def start(self, request: Request, body: GenerationRequest, prompt_field: str) -> None:
        """Queue all prompts. Raises APIError 400 if the engine cannot serve them, QueueFullError, EngineDeadError."""
        most, num_choices = self._server.options.max_choices, len(self._prompts) * self.params.n
        if num_choices > most:
            raise APIError(400, f"a request may have {most} completions (prompts times n), got {num_choices}", "n")
        self._shows_ids = bool(getattr(body, "return_token_ids", None))
        self._shows_misses = bool(body.return_prefix_misses)
        self._llm = self._server.check_ready()
        check_misses(body, self._llm.engine.config.explain_prefix_misses)
        check_max_tokens(body, self._llm.engine.parts.max_model_len)
        check_lengths(self._prompts, prompt_field, self._server.bounds.of_prompts(body))
        self._adapter = self._server.adapter_of(body.model)
        more = self.params, body.priority or 0, bool(body.stream), self._adapter
        requests = [
            NewRequest(request_id, salted(prompt, body.cache_salt), *more)
            for request_id, prompt in zip(self.indices, self._prompts, strict=True)
        ]
        self._server.adapters.hold(self._adapter)
        try:
            with refuse(prompt_field):
                self._inbox = await self._llm.submit(requests, partial(self.workers.run_long, request))
        except BaseException:
            self._server.adapters.release(self._adapter)
            raise
        self._server.num_in_progress += 1

    async def outputs(self) -> AsyncIterator[list[RequestOutput]]:
        """Yield lists of the outputs that have grown, at most one for each request."""
        assert self._inbox is not None
        while self._inbox.unfinished:
            outputs = await self._inbox.take()
            for output in outputs:
                self.latest[output.request_id] = output
                num_told = self._count(output)
                self._num_new += num_told - self._num_told.get(output.request_id, 0)
                self._num_told[output.request_id] = num_told
                if output.finished:
                    self._note_end(output, self._reason(output))
            yield outputs

    @property
    def is_read(self) -> bool:
        """Whether `outputs()` has yielded the last outputs."""
        return self._inbox is not None and not self._inbox.unfinished

    def take_num_new(self) -> int:
        """Return the number of new tokens and log-probabilities since the last call.

        After the last outputs, return the number of all of them, because the last events may repeat them.
        """
        num_new, self._num_new = self._num_new, 0
        return sum(self._num_told.values()) if self.is_read else num_new

    def _count(self, output: RequestOutput) -> int:
        num_tokens = sum([len(completion.token_ids) for completion in output.outputs])
        num_told = num_tokens * (1 + (self.params.logprobs or 0))
        if output.prompt_logprobs:
            num_told += len(output.prompt_logprobs) * (1 + (self.params.prompt_logprobs or 0))
        if self._shows_ids:
            num_told += num_tokens + len(output.prompt_token_ids) * len(output.outputs)
        if self._shows_misses:
            num_told += len(output.metrics.prefix_misses or ())
        return num_told

    @property
    def shows_logprobs(self) -> bool:
        """Whether the outputs have log-probabilities."""
        return self.params.logprobs is not None

    async def finish(self) -> list[RequestOutput]:
        """Wait for all requests, and return their last outputs in the order of the prompts."""
        async for _ in self.outputs():
            pass
        return [self.latest[request_id] for request_id in self.indices]

    async def cancel(self) -> None:
        """Abort the requests. `outputs()` still yields their output so far, with the reason `abort`."""
        if self._llm is not None and self._inbox is not None:
            await self._llm.abort(self.indices)

    def close(self) -> None:
        """Abort the unfinished requests. A second call does nothing."""
        if self._inbox is not None and self._llm is not None:
            self._llm.close(self._inbox)
            self._server.num_in_progress -= 1
            self._server.adapters.release(self._adapter)
            for request_id in sorted(self._inbox.unfinished):
                if request_id in self.latest:
                    self._note_end(self.latest[request_id], "abort")
                else:
                    self._server.metrics.note_abort()
                    if self._server.options.log_requests:
                        logger.info("%s abort: before its first token", told_name(request_id))
            self._inbox = None

    def _reason(self, output: RequestOutput) -> str:
        reasons = [completion.finish_reason or "abort" for completion in output.outputs]
        return "abort" if "abort" in reasons else reasons[0]

    def _note_end(self, output: RequestOutput, reason: str) -> None:
        times = output.metrics
        lengths = [len(completion.token_ids) for completion in output.outputs]
        self._server.metrics.note_end(times, self._arrival_time, len(output.prompt_token_ids), lengths, reason)
        if not self._server.options.log_requests:
            return
        ttft = None if times.first_token_time is None else times.first_token_time - self._arrival_time
        logger.info(
            "%s %s: %d tokens in (%d cached), %d out%s%s",
            told_name(output.request_id),
            reason,
            len(output.prompt_token_ids),
            output.num_cached_tokens,
            sum(lengths),
            "" if ttft is None else f", first after {1000 * ttft:.1f} ms",
            "" if times.tpot is None else f", then {1000 * times.tpot:.2f} ms each",
        )


def engine_ids(request_id: str, num_prompts: int) -> list[str]:
    """Return the engine's name of each prompt. They are unique, although clients may use a name for two requests."""
    unique = uuid4().hex[:8]
    return [f"{request_id}-{i}#{unique}" for i in range(num_prompts)]


def told_name(engine_id: str) -> str:
    """Return the name of a prompt in the log."""
    return engine_id.rpartition("#")[0]


def usage_of(outputs: Iterable[RequestOutput], with_output: bool = True) -> dict[str, object]:
    """Return OpenAI's usage: the numbers of tokens. Without `with_output`, generated tokens are not counted."""
    outputs = list(outputs)
    num_prompt = sum(len(output.prompt_token_ids) for output in outputs)
    num_output = sum(len(completion.token_ids) for output in outputs for completion in output.outputs) * with_output
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_output,
        "total_tokens": num_prompt + num_output,
        "prompt_tokens_details": {"cached_tokens": sum(output.num_cached_tokens for output in outputs)},
    }
