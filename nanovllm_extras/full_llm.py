"""`LLM` with everything: vLLM's options, priorities, chat options, embeddings, scores, beam search, statistics.

Calls may interleave: a stream that pauses and another call advance each other's requests.
"""

import sys
from collections.abc import Callable, Collection, Generator, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from tqdm import tqdm

from nanovllm import llm, sampling_params
from nanovllm.checks import check_bool
from nanovllm.llm import Requests, spread
from nanovllm.prompts import ChatPrompt, Message, Prompt, conversations_of, is_single_prompt
from nanovllm_extras.engine.engine_stats import EngineStats
from nanovllm_extras.engine.full_engine import LLMEngine
from nanovllm_extras.lora.lora_request import LoRARequest
from nanovllm_extras.machine.forks import check_process
from nanovllm_extras.options.all_options import Config
from nanovllm_extras.options.chat_options import ChatOptions, render_chat
from nanovllm_extras.options.option_checks import LazyMethod, translate_options
from nanovllm_extras.options.request_params import SamplingParams
from nanovllm_extras.requests.lazy_outputs import RequestOutput

if TYPE_CHECKING:
    from nanovllm_extras.beam_search import beam_params
    from nanovllm_extras.embedding import pooling_params
    from nanovllm_extras.embedding import score as pair_score
    from nanovllm_extras.vllm import vllm_metrics


Adapters = LoRARequest | Collection[LoRARequest | None] | None
"""One for all prompts, a list with one or None for each, or None for none."""


class NoBar(AbstractContextManager["NoBar"]):
    """A progress bar that shows nothing."""

    def __init__(self, **_: object) -> None: ...

    def update(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


class LLM(llm.LLM):
    """`LLM(model, **options)`: the options are the fields of `Config`. `trace` is a file to record the run in.

    >>> with LLM(TINY_QWEN3) as llm:
    ...     llm.chat([{"role": "user", "content": "What is a block table?"}])[0].outputs[0].text
    """

    def __init__(self, model: str | Path, *, trace: str | Path | None = None, **options: object) -> None:
        self._trace = trace
        self._on_shutdown = ExitStack()
        self._engine: LLMEngine | None = None
        # by request: the outputs that its call has not taken yet; all requests of a call share one inbox
        self._inboxes: dict[str, dict[str, Any]] = {}
        super().__init__(model, **options)
        self._on_shutdown.callback(self.engine.runner.ranks.stop)  # even if a traceback still holds the engine

    def make_engine(self, model: str | Path, options: Mapping[str, object]) -> LLMEngine:
        config = Config.from_options(model, options)
        if self._trace is None:
            return LLMEngine(config)
        from nanovllm_extras.trace.recorder import start_engine

        return start_engine(LLMEngine, config, self._trace, self._on_shutdown)

    @property
    def engine(self) -> LLMEngine:
        if self._engine is None:
            raise RuntimeError("this LLM has been shut down; make a new one")
        return self._engine

    @engine.setter
    def engine(self, engine: LLMEngine) -> None:
        self._engine = engine

    llm_engine = engine
    """vLLM's name for it."""

    if TYPE_CHECKING:
        from_engine_args: Callable[[object], "LLM"]
        beam_search, embed = beam_params.beam_search, pooling_params.embed
        score = pair_score.score
        get_metrics = vllm_metrics.get_metrics
    else:
        from_engine_args = LazyMethod("vllm.engine_args", of_class=True)
        beam_search = LazyMethod("beam_search.beam_params")
        embed = LazyMethod("embedding.pooling_params")
        score = LazyMethod("embedding.score")
        get_metrics = LazyMethod("vllm.vllm_metrics")

    def generate(
        self,
        prompts: Prompt | Collection[Prompt],
        sampling_params: SamplingParams | Collection[SamplingParams] | None = None,
        use_tqdm: bool | Callable[..., object] = True,
        priority: int | Collection[int] | None = None,
        lora_request: Adapters = None,
        **vllm_options: object,
    ) -> list[RequestOutput]:
        """Complete all prompts, and return the outputs in their order.

        prompts: one prompt or a list of them; a prompt is a str, a list of token ids, `{"prompt": str}` or
            `{"prompt_token_ids": list}`.
        sampling_params: one for all, or one for each; None is `get_default_sampling_params()`.
        use_tqdm: whether to show a progress bar, or a function to make one with, such as `tqdm`.
        priority: one for all, or one for each prompt, smaller first, for `scheduling_policy="priority"`.
        lora_request: one LoRA adapter for all prompts, or a list with one or None for each; needs `enable_lora=True`.
        vllm_options: others of vLLM, only at their neutral values (`tokenization_kwargs=None`).
        Raises TypeError or ValueError before anything is queued if any of them is bad.
        """
        names = ("prompts", "sampling_params", "use_tqdm", "priority", "lora_request")
        translate_options(vllm_options, names, "request")
        return self._complete(self._check(prompts, sampling_params, priority, lora_request=lora_request), use_tqdm)

    def stream(
        self,
        prompts: Prompt | Collection[Prompt],
        sampling_params: SamplingParams | Collection[SamplingParams] | None = None,
        priority: int | Collection[int] | None = None,
        lora_request: Adapters = None,
    ) -> Generator[RequestOutput, None, None]:
        """Like `generate`, but yield each request's output whenever it has grown; `finished` is True on the last.

        Each `outputs[i].text` is a prefix of the next one. Closing the iterator early aborts the unfinished requests.
        """
        return self._stream(self._check(prompts, sampling_params, priority, lora_request=lora_request))

    def chat(
        self,
        messages: Collection[Message] | Collection[Collection[Message]],
        sampling_params: SamplingParams | Collection[SamplingParams] | None = None,
        use_tqdm: bool | Callable[..., object] = True,
        priority: int | Collection[int] | None = None,
        lora_request: Adapters = None,
        **options: object,
    ) -> list[RequestOutput]:
        """Answer one conversation, or each of a list; a message is `{"role": "user", "content": "…"}`.

        options: the fields of `nanovllm_extras/options/chat_options.py`'s `ChatOptions`: `add_generation_prompt`,
            `continue_final_message`, `chat_template`, `chat_template_kwargs`, `tools`.
        """
        prompts = self.render_chat(messages, **options)
        return self.generate(prompts, sampling_params, use_tqdm, priority, lora_request)

    def render_chat(
        self, messages: Collection[Message] | Collection[Collection[Message]], **options: Any
    ) -> list[ChatPrompt]:
        """Render conversations as prompts by the model's chat template. `options` are those of `chat`."""
        chat_options = ChatOptions(**options)
        return [render_chat(self.engine.tokenizer, one, chat_options) for one in conversations_of(messages)]

    def get_tokenizer(self) -> Any:
        """Return the `transformers` tokenizer of the model, or None if its folder has none."""
        return self.engine.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the parameters of requests without any: generation_config.json, and vLLM's defaults for the rest.

        They are the caller's own, to be changed and handed back: `params.max_tokens = 20`.
        """
        return self.engine.parts.default_sampling_params.clone()

    def get_stats(self) -> EngineStats:
        return self.engine.get_stats()

    def reset_prefix_cache(self, **vllm_options: object) -> None:
        translate_options(vllm_options, (), "request")
        self.engine.reset_prefix_cache()

    def shutdown(self) -> None:
        """Release the model and its cache, and give the GPU's memory back. A second call does nothing.

        Unfinished calls of this thread, such as a paused stream, raise RuntimeError when they go on. Raises
        RuntimeError while another thread uses this LLM, or has an unfinished stream.
        """
        use: AbstractContextManager[None] = nullcontext()
        if self._engine is not None and not self._engine.one_thread.is_forked:
            use = self._engine.one_thread.use(during_step=True)  # because a signal handler may call this in a step
        with use:
            self._engine = None
            self._on_shutdown.close()
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def _complete(self, requests: Requests, use_tqdm: bool | Callable[..., object]) -> list[Any]:
        """As the core's; `use_tqdm` may be a function that makes the bar."""
        check_bool("use_tqdm", callable(use_tqdm) or use_tqdm)
        if not callable(use_tqdm):  # without a bar, not even the thread that watches bars is started
            use_tqdm = tqdm if use_tqdm and sys.stderr is not None else NoBar
        return super()._complete(requests, use_tqdm)

    def _check(
        self,
        prompts: Any,
        params: object,
        priority: object = None,
        name: str = "sampling_params",
        kind: type = sampling_params.SamplingParams,
        lora_request: Adapters = None,
    ) -> Requests:
        """Return requests that can be served. Raises if one cannot. Parameters are of `kind`; None is the default."""
        processor = self.engine.input_processor
        prompt_list = [prompts] if is_single_prompt(prompts) else list(prompts)
        wanted = spread(name, params, kind, self.engine.parts.default_sampling_params, len(prompt_list))
        priorities = spread("priority", priority, int, 0, len(prompt_list))
        adapters = spread_adapters(lora_request, len(prompt_list))
        distinct = {id(one): one for one in wanted}  # parameters of many prompts are taken once
        requests: Requests = {}
        check_process()
        with self.engine.one_thread.use():
            for adapter in dict.fromkeys(adapters):  # a bad one is refused before anything is queued
                if adapter is not None:
                    self.engine.find_adapter(adapter)
            taken = {key: processor.take_params(one) for key, one in distinct.items()}
            for prompt, one, rank, adapter in zip(prompt_list, wanted, priorities, adapters, strict=True):
                text, token_ids = processor.encode(prompt, taken[id(one)].params)
                given = prompt if isinstance(prompt, Mapping) else {}
                encoded = {**given, "prompt": text, "prompt_token_ids": token_ids}
                requests[str(next(self._request_ids))] = encoded, taken[id(one)], rank, adapter
        return requests

    def _outputs(self, requests: Requests, stream: bool) -> Generator[Any, None, None]:
        """As the core's, but other calls may be unfinished; and however it ends, no step stays in flight."""
        try:
            yield from self._take_outputs(requests, stream)
            self.engine.settle()
        except GeneratorExit:  # the caller has closed the iterator
            if self._engine is not None:
                self._engine.settle()
            raise
        except BaseException:
            if self._engine is not None:
                self._engine.recover()
            raise

    def _take_outputs(self, requests: Requests, stream: bool) -> Generator[Any, None, None]:
        """Queue the requests, step until all are finished, and yield the outputs.

        However it ends, none of the requests stays in the engine. Requests of other calls, such as a paused stream,
        advance too: each call finds the latest outputs of its requests in its inbox.
        """
        inbox: dict[str, Any] = {}
        unfinished = set(requests)
        try:
            self._inboxes |= dict.fromkeys(requests, inbox)
            for request_id, (prompt, params, rank, adapter) in requests.items():
                self.engine.add_request(request_id, prompt, params, rank, stream, adapter)
            while unfinished:
                while not inbox:
                    self._step(unfinished)
                while inbox:
                    output = inbox.pop(next(iter(inbox)))
                    unfinished -= {output.request_id} if output.finished else set()
                    yield output
        finally:
            for request_id in requests:
                self._inboxes.pop(request_id, None)
                if request_id in unfinished and self._engine is not None:  # after `shutdown` there is nothing to abort
                    self._engine.abort_request(request_id)

    def _step(self, unfinished: set[str]) -> None:
        """Run one step for all calls. `unfinished` are the requests of the call that waits."""
        if not self.engine.has_unfinished_requests():
            raise RuntimeError(
                f"requests {sorted(unfinished)} are not in the engine any more: they were aborted, a step of another "
                f"call failed, or another caller took their outputs"
            )
        for output in self._step_engine():
            if output.request_id in self._inboxes:
                self._inboxes[output.request_id][output.request_id] = output


def spread_adapters(value: Adapters, num_prompts: int) -> list[LoRARequest | None]:
    """Expand one adapter, a list, or None to a list with one entry, perhaps None, per prompt."""
    if value is None or isinstance(value, LoRARequest):
        return [value] * num_prompts
    found = list(value) if isinstance(value, list | tuple) else None
    if found is None or not all(one is None or isinstance(one, LoRARequest) for one in found):
        raise TypeError(f"lora_request must be a LoRARequest, a list of them or of None, or None, got {value!r}")
    if len(found) != num_prompts:
        raise ValueError(f"there must be one lora_request for each prompt, got {len(found)} for {num_prompts} prompts")
    return found
