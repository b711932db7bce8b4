"""`LLM`: prompts in, answers out, all at once (`generate`, `chat`) or as they grow (`stream`).

Turns the forms that a prompt may have into requests, steps the engine until all are done, and shows a progress bar.
`LLMEngine` does the work; take it directly to drive the loop yourself.
"""

from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from contextlib import ExitStack
from dataclasses import fields
from itertools import count
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from nanovllm.checks import check_bool
from nanovllm.config import Config
from nanovllm.engine.arg_utils import EngineArgs
from nanovllm.engine.chat import ChatOptions, Message, render_conversation
from nanovllm.engine.engine import LLMEngine
from nanovllm.engine.intake import Params
from nanovllm.engine.metrics import Metric, make_metrics
from nanovllm.inputs import Prompt, is_single_prompt, spread
from nanovllm.outputs import BeamSearchOutput, EmbeddingRequestOutput, EngineStats, RequestOutput
from nanovllm.pooling_params import PoolingParams
from nanovllm.sampling_params import BeamSearchParams, SamplingParams
from nanovllm.trace.start import start_engine
from nanovllm.vllm_options import translate
from nanovllm.vllm_tables import REQUEST_OPTIONS

PARAMS_NAMES: Mapping[type, str] = {SamplingParams: "sampling_params", PoolingParams: "pooling_params"}


class LLM:
    """`LLM(model, **options)`: the options are the fields of `Config`. `trace` is a file to record the run in.

    >>> with LLM(TINY_QWEN3) as llm:
    ...     llm.chat([{"role": "user", "content": "What is a block table?"}])[0].outputs[0].text
    """

    def __init__(self, model: str | Path, *, trace: str | Path | None = None, **options: Any) -> None:
        self._on_shutdown = ExitStack()
        config = Config.from_options(model, options)
        self._engine: LLMEngine | None = start_engine(config, trace, self._on_shutdown)
        self._request_ids = count()
        # by request: the outputs that its call has not taken yet; all requests of a call share one inbox
        self._inboxes: dict[str, dict[str, Any]] = {}

    @property
    def engine(self) -> LLMEngine:
        if self._engine is None:
            raise RuntimeError("this LLM has been shut down; make a new one")
        return self._engine

    @property
    def llm_engine(self) -> LLMEngine:
        """`engine`, by vLLM's name."""
        return self.engine

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> "LLM":
        return cls(**vars(engine_args))

    def generate(
        self,
        prompts: Prompt | SequenceOf[Prompt],
        sampling_params: SamplingParams | SequenceOf[SamplingParams] | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        priority: int | SequenceOf[int] | None = None,
        **vllm_options: Any,
    ) -> list[RequestOutput]:
        """Complete all prompts; outputs come in their order.

        prompts: one prompt or a list of them; a prompt is a str, a list of token ids, `{"prompt": str}` or
            `{"prompt_token_ids": list}`.
        sampling_params: one for all, or one for each; None is `get_default_sampling_params()`.
        use_tqdm: whether to show a progress bar, or a function to make one with, such as `tqdm`.
        priority: one for all, or one for each prompt, smaller first, for `scheduling_policy="priority"`.
        vllm_options: others of vLLM, at their neutral values alone (`lora_request=None`).
        Raises TypeError or ValueError before anything is queued if any of them is bad.
        """
        translate(vllm_options, ("prompts", "sampling_params", "use_tqdm", "priority"), REQUEST_OPTIONS)
        return self._complete(self._check(prompts, sampling_params, priority), use_tqdm)

    def embed(
        self,
        prompts: Prompt | SequenceOf[Prompt],
        pooling_params: PoolingParams | SequenceOf[PoolingParams] | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        **vllm_options: Any,
    ) -> list[EmbeddingRequestOutput]:
        """The embedding of each prompt, `outputs[i].outputs.embedding`: by default the normalised last hidden state.

        Raises TypeError or ValueError before anything is queued if a prompt or a parameter is bad.
        """
        translate(vllm_options, ("prompts", "pooling_params", "use_tqdm"), REQUEST_OPTIONS)
        return self._complete(self._check(prompts, pooling_params, None, PoolingParams()), use_tqdm)

    def stream(
        self,
        prompts: Prompt | SequenceOf[Prompt],
        sampling_params: SamplingParams | SequenceOf[SamplingParams] | None = None,
        priority: int | SequenceOf[int] | None = None,
    ) -> Iterator[RequestOutput]:
        """As `generate`, but yields each request's output whenever it has grown, `finished` on the last.

        Each `outputs[i].text` is a prefix of the next one. Closing the iterator early aborts the unfinished requests.
        """
        requests = self._check(prompts, sampling_params, priority)
        return self._stream(requests)

    def beam_search(
        self, prompts: Prompt | SequenceOf[Prompt], params: BeamSearchParams, use_tqdm: bool = False
    ) -> list[BeamSearchOutput]:
        """The likeliest completions of each prompt that a search of `params.beam_width` beams finds, best first."""
        prompt_list: list[Any] = [prompts] if is_single_prompt(prompts) else list(prompts)
        encoded = [self.engine.intake.encode(prompt) for prompt in prompt_list]
        self.engine.limits.check_beam_search_params(params)
        request_ids: list[str] = []
        try:
            for text, token_ids in encoded:
                request_ids.append(str(next(self._request_ids)))
                prompt = {"prompt": text, "prompt_token_ids": token_ids}
                self.engine.add_beam_search(request_ids[-1], prompt, params)
            outputs: Any = tqdm(self._outputs(request_ids), total=len(request_ids), unit="req", disable=not use_tqdm)
            finished = {output.request_id: output for output in outputs}
        except BaseException:
            self._abort(request_ids)
            self.engine.recover()
            raise
        return [finished[request_id] for request_id in request_ids]

    def chat(
        self,
        messages: SequenceOf[Message] | SequenceOf[SequenceOf[Message]],
        sampling_params: SamplingParams | SequenceOf[SamplingParams] | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        priority: int | SequenceOf[int] | None = None,
        **options: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation, or each of a list; a message is `{"role": "user", "content": "…"}`.

        options: the fields of `ChatOptions`: `add_generation_prompt`, `continue_final_message`, `chat_template`,
            `chat_template_kwargs`, `tools`.
        """
        return self.generate(self.render_chat(messages, **options), sampling_params, use_tqdm, priority)

    def render_chat(
        self, messages: SequenceOf[Message] | SequenceOf[SequenceOf[Message]], **options: Any
    ) -> list[Prompt]:
        """Conversations as prompts by the model's chat template, for `generate` and `stream`; `options` as `chat`."""
        chat_options = ChatOptions(**translate(options, [field.name for field in fields(ChatOptions)], REQUEST_OPTIONS))
        if not isinstance(messages, SequenceOf) or isinstance(messages, str) or not messages:
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
        return self.engine.default_sampling_params.clone()

    def get_stats(self) -> EngineStats:
        return self.engine.get_stats()

    def get_metrics(self) -> list[Metric]:
        """Counters, gauges and histograms, by vLLM's names with the prefix `nanovllm:`."""
        return make_metrics(self.engine.get_stats(), self.engine.counters.observed)

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

    def _complete(self, requests: list[tuple[Prompt, Params, int]], use_tqdm: bool | Callable[..., Any]) -> list[Any]:
        """The last output of each request, in their order."""
        check_bool("use_tqdm", callable(use_tqdm) or use_tqdm)
        make_bar = use_tqdm if callable(use_tqdm) else tqdm
        request_ids: list[str] = []
        finished: dict[str, Any] = {}
        try:
            self._queue(request_ids, requests, stream=False)
            with make_bar(total=len(request_ids), desc="Generating", unit="req", disable=not use_tqdm) as bar:
                for output in self._outputs(request_ids):
                    finished[output.request_id] = output
                    bar.update()
        except BaseException:  # KeyboardInterrupt too: no request of this call stays in the engine
            self._abort(request_ids)
            self.engine.recover()
            raise
        return [finished[request_id] for request_id in request_ids]

    def _check(
        self, prompts: Any, params: Any, priority: Any, default: Params | None = None
    ) -> list[tuple[Prompt, Params, int]]:
        """(encoded prompt, parameters, priority) of each request; raises if one of them cannot be served."""
        encode = self.engine.intake.encode
        prompt_list: list[Any] = [prompts] if is_single_prompt(prompts) else list(prompts)
        default = default or self.engine.default_sampling_params
        wanted = spread(PARAMS_NAMES[type(default)], params, type(default), default, len(prompt_list))
        priorities = spread("priority", priority, int, 0, len(prompt_list))
        # now: a stream is queued when it is first read
        taken = {id(one): self.engine.intake.take_params(one) for one in wanted}
        wanted = [taken[id(one)] for one in wanted]
        encoded = [encode(prompt, one) for prompt, one in zip(prompt_list, wanted, strict=True)]
        ready: list[Any] = [{"prompt": text, "prompt_token_ids": token_ids} for text, token_ids in encoded]
        return list(zip(ready, wanted, priorities, strict=True))

    def _queue(self, request_ids: list[str], requests: list[tuple[Prompt, Params, int]], stream: bool) -> None:
        """Queue all requests; the id of each is noted in `request_ids` before it is queued."""
        for prompt, params, priority in requests:
            request_ids.append(str(next(self._request_ids)))
            self.engine.add_request(request_ids[-1], prompt, params, priority, stream)

    def _stream(self, requests: list[tuple[Prompt, Params, int]]) -> Iterator[RequestOutput]:
        """Queues its requests when the first output is asked for: a stream that is never read has queued nothing."""
        request_ids: list[str] = []
        try:
            self._queue(request_ids, requests, stream=True)
            yield from self._outputs(request_ids)
        except GeneratorExit:  # the caller has closed the iterator
            self._abort(request_ids)
            self.engine.settle()
            raise
        except BaseException:
            self._abort(request_ids)
            self.engine.recover()
            raise

    def _outputs(self, request_ids: list[str]) -> Iterator[Any]:
        """Step until all requests are finished, and yield their outputs.

        Requests of other calls, such as a stream that pauses, advance along with them: each call finds the latest
        output of its requests in its inbox.
        """
        unfinished = set(request_ids)
        inbox: dict[str, Any] = {}
        self._inboxes.update(dict.fromkeys(request_ids, inbox))
        try:
            while unfinished:
                while not inbox:
                    if not self.engine.has_unfinished_requests():
                        raise RuntimeError(
                            f"requests {sorted(unfinished)} were aborted, or another caller took their outputs"
                        )
                    for output in self.engine.step().outputs:
                        if output.request_id in self._inboxes:
                            self._inboxes[output.request_id][output.request_id] = output
                while inbox:
                    request_id = next(iter(inbox))
                    output = inbox.pop(request_id)
                    unfinished -= {request_id} if output.finished else set()
                    yield output
        finally:
            for request_id in request_ids:
                self._inboxes.pop(request_id, None)
        self.engine.settle()

    def _abort(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            self.engine.abort_request(request_id)
