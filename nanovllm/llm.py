"""`LLM`: prompts in, answers out, all at once (`generate`, `chat`) or as they grow (`stream`).

Turns prompts into requests, steps the engine until all are done. `LLMEngine` does the work, also for your own loop.
"""

from collections import abc
from collections.abc import Callable, Collection, Generator, Iterator, Mapping
from contextlib import ExitStack, closing
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from tqdm import tqdm

from nanovllm.chat import Message, render_conversation
from nanovllm.checks import OfExtra, check_bool, extra, translate_options
from nanovllm.config import Config
from nanovllm.engine import LLMEngine
from nanovllm.inputs import Prompt, is_single_prompt, spread
from nanovllm.outputs import EngineStats, RequestOutput
from nanovllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from nanovllm.extras.beam_search import beam_params as beam_search
    from nanovllm.extras.embedding import pooling_params as embedding
    from nanovllm.extras.vllm import vllm_metrics as metrics

Requests = dict[str, tuple[Prompt, Any, int]]
"""Request id -> encoded prompt, parameters, priority."""


class LLM:
    """`LLM(model, **options)`: the options are the fields of `Config`. `trace` is a file to record the run in.

    >>> with LLM(TINY_QWEN3) as llm:
    ...     llm.chat([{"role": "user", "content": "What is a block table?"}])[0].outputs[0].text
    """

    def __init__(self, model: str | Path, *, trace: str | Path | None = None, **options: Any) -> None:
        self._on_shutdown = ExitStack()
        config = Config.from_options(model, options)
        self._engine: LLMEngine | None
        if trace is None:
            self._engine = LLMEngine(config)
        else:
            with extra("trace", "LLM(…, trace=…)"):
                from nanovllm.extras.trace.recorder import start_engine
            self._engine = start_engine(config, trace, self._on_shutdown, LLMEngine)
        self._on_shutdown.callback(self._engine.runner.stop)  # even if a traceback still holds the engine
        self._request_ids = count()
        # by request: the outputs that its call has not taken yet; all requests of a call share one inbox
        self._inboxes: dict[str, dict[str, Any]] = {}

    @property
    def engine(self) -> LLMEngine:
        if self._engine is None:
            raise RuntimeError("this LLM has been shut down; make a new one")
        return self._engine

    llm_engine = engine
    """vLLM's name for it."""

    if TYPE_CHECKING:
        from_engine_args: Callable[[Any], "LLM"]
        beam_search, embed, get_metrics = beam_search.beam_search, embedding.embed, metrics.get_metrics
    else:
        from_engine_args = OfExtra("vllm/engine_args")
        beam_search = OfExtra("beam_search/beam_params")
        embed = OfExtra("embedding/pooling_params")
        get_metrics = OfExtra("vllm/vllm_metrics")

    def generate(
        self,
        prompts: Prompt | Collection[Prompt],
        sampling_params: SamplingParams | Collection[SamplingParams] | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        priority: int | Collection[int] | None = None,
        **vllm_options: Any,
    ) -> list[RequestOutput]:
        """Complete all prompts; outputs come in their order.

        prompts: one prompt or a list of them; a prompt is a str, a list of token ids, `{"prompt": str}` or
            `{"prompt_token_ids": list}`.
        sampling_params: one for all, or one for each; None is `get_default_sampling_params()`.
        use_tqdm: whether to show a progress bar, or a function to make one with, such as `tqdm`.
        priority: one for all, or one for each prompt, smaller first, for `scheduling_policy="priority"`.
        vllm_options: others of vLLM, only at their neutral values (`lora_request=None`).
        Raises TypeError or ValueError before anything is queued if any of them is bad.
        """
        translate_options(vllm_options, ("prompts", "sampling_params", "use_tqdm", "priority"), "request")
        return self._complete(self._check(prompts, sampling_params, priority), use_tqdm)

    def stream(
        self,
        prompts: Prompt | Collection[Prompt],
        sampling_params: SamplingParams | Collection[SamplingParams] | None = None,
        priority: int | Collection[int] | None = None,
    ) -> Iterator[RequestOutput]:
        """As `generate`, but yields each request's output whenever it has grown, `finished` on the last.

        Each `outputs[i].text` is a prefix of the next one. Closing the iterator early aborts the unfinished requests.
        """
        return self._stream(self._check(prompts, sampling_params, priority))

    def chat(
        self,
        messages: Collection[Message] | Collection[Collection[Message]],
        sampling_params: SamplingParams | Collection[SamplingParams] | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        priority: int | Collection[int] | None = None,
        **options: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation, or each of a list; a message is `{"role": "user", "content": "…"}`.

        options: the fields of `extras/chat_options.py`'s `ChatOptions`: `add_generation_prompt`,
            `continue_final_message`, `chat_template`, `chat_template_kwargs`, `tools`.
        """
        return self.generate(self.render_chat(messages, **options), sampling_params, use_tqdm, priority)

    def render_chat(
        self, messages: Collection[Message] | Collection[Collection[Message]], **options: Any
    ) -> list[Prompt]:
        """Conversations as prompts by the model's chat template, for `generate` and `stream`; `options` as `chat`."""
        chat_options = None
        if options:
            with extra("extras/chat_options.py", next(iter(options))):
                from nanovllm.extras.chat_options import ChatOptions
            chat_options = ChatOptions(**options)
        if not isinstance(messages, abc.Sequence) or isinstance(messages, str) or not messages:
            raise TypeError(f"messages must be a list of messages, or a list of such lists, got {messages!r}")
        conversations: Any = [messages] if isinstance(messages[0], Mapping) else messages
        return [render_conversation(self.get_tokenizer(), one, chat_options) for one in conversations]

    def get_tokenizer(self) -> Any:
        """The `transformers` tokenizer of the model, or None if its folder holds none."""
        return self.engine.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """The parameters of requests that bring none: the model's generation_config.json over vLLM's defaults.

        They are the caller's own, to be changed and handed back: `params.max_tokens = 20`.
        """
        return self.engine.parts.default_sampling_params.clone()

    def get_stats(self) -> EngineStats:
        return self.engine.get_stats()

    def reset_prefix_cache(self) -> None:
        self.engine.reset_prefix_cache()

    def shutdown(self) -> None:
        """Release the model and its cache, and give the GPU's memory back. A second call does nothing."""
        self._engine = None
        self._on_shutdown.close()
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def _complete(self, requests: Requests, use_tqdm: bool | Callable[..., Any]) -> list[Any]:
        """The last output of each request, in their order."""
        check_bool("use_tqdm", callable(use_tqdm) or use_tqdm)
        make_bar = use_tqdm if callable(use_tqdm) else tqdm
        finished: dict[str, Any] = {}
        with (
            make_bar(total=len(requests), desc="Generating", unit="req", disable=not use_tqdm) as bar,
            closing(self._stream(requests, stream=False)) as outputs,
        ):
            for output in outputs:
                finished[output.request_id] = output
                bar.update()
        return [finished[request_id] for request_id in requests]

    def _check(
        self, prompts: Any, params: Any, priority: Any, name: str = "sampling_params", kind: type = SamplingParams
    ) -> Requests:
        """Requests that can be served; raises if one cannot. Parameters are of `kind`; None is the default."""
        processor = self.engine.input_processor
        prompt_list = [prompts] if is_single_prompt(prompts) else list(prompts)
        wanted = spread(name, params, kind, self.engine.parts.default_sampling_params, len(prompt_list))
        priorities = spread("priority", priority, int, 0, len(prompt_list))
        # now: a stream is queued when it is first read
        taken = {id(one): processor.take_params(one) for one in wanted}
        requests: Requests = {}
        for prompt, one, rank in zip(prompt_list, wanted, priorities, strict=True):
            text, token_ids = processor.encode(prompt, taken[id(one)].params)
            encoded = {"prompt": text, "prompt_token_ids": token_ids}
            requests[str(next(self._request_ids))] = encoded, taken[id(one)], rank
        return requests

    def _stream(self, requests: Requests, stream: bool = True) -> Generator[Any, None, None]:
        """Queue the requests when the first output is asked for, step until all are finished, yield their outputs.

        However it ends, none of its requests stays in the engine. Requests of other calls, such as a stream that
        pauses, advance along with them: each call finds the latest output of its requests in its inbox.
        """
        unfinished: set[str] = set()
        inbox: dict[str, Any] = {}
        try:
            for request_id, request in requests.items():
                unfinished.add(request_id)  # before it is queued: an interrupt can come between any two lines
                self._inboxes[request_id] = inbox
                self.engine.add_request(request_id, *request, stream)
            while unfinished:
                while not inbox:
                    self._step(unfinished)
                while inbox:
                    request_id = next(iter(inbox))
                    output = inbox.pop(request_id)
                    unfinished -= {request_id} if output.finished else set()
                    yield output
            self.engine.settle()
        except BaseException as error:
            for request_id in requests:
                if request_id in unfinished:
                    self.engine.abort_request(request_id)
            if isinstance(error, GeneratorExit):  # the caller has closed the iterator
                self.engine.settle()
            else:
                self.engine.recover()
            raise
        finally:
            for request_id in requests:
                self._inboxes.pop(request_id, None)

    def _step(self, unfinished: set[str]) -> None:
        """One step for all calls; `unfinished` are the requests of the call that waits."""
        if not self.engine.has_unfinished_requests():
            raise RuntimeError(f"requests {sorted(unfinished)} were aborted, or another caller took their outputs")
        for output in self.engine.step().outputs:
            if output.request_id in self._inboxes:
                self._inboxes[output.request_id][output.request_id] = output
