"""`LLM`: prompts in, answers out, all at once (`generate`, `chat`) or as they grow (`stream`).

Turns the forms that a prompt may have into requests, steps the engine until all are done, and shows a progress bar.
`LLMEngine` does the work; take it directly to drive the loop yourself.
"""

from collections import abc
from collections.abc import Callable, Collection, Generator, Iterator, Mapping
from contextlib import ExitStack, closing
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from tqdm import tqdm

from nanovllm.checks import check_bool, extra, own_options
from nanovllm.config import Config
from nanovllm.engine.chat import Message, render_conversation
from nanovllm.engine.engine import LLMEngine
from nanovllm.inputs import Prompt, as_list, spread
from nanovllm.outputs import EngineStats, RequestOutput
from nanovllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from nanovllm.extras.beam_search.params import BeamSearchOutput, BeamSearchParams
    from nanovllm.extras.embedding.params import EmbeddingRequestOutput, PoolingParams
    from nanovllm.extras.vllm.engine_args import EngineArgs
    from nanovllm.extras.vllm.metrics import Metric

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
                from nanovllm.trace.recorder import start_engine
            self._engine = start_engine(config, trace, self._on_shutdown, LLMEngine)
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
    def from_engine_args(cls, engine_args: "EngineArgs") -> "LLM":
        return cls(**vars(engine_args))

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
        own_options(vllm_options, ("prompts", "sampling_params", "use_tqdm", "priority"), "request")
        return self._complete(self._check(prompts, sampling_params, priority), use_tqdm)

    def embed(
        self,
        prompts: Prompt | Collection[Prompt],
        pooling_params: "PoolingParams | Collection[PoolingParams] | None" = None,
        use_tqdm: bool | Callable[..., Any] = True,
        **vllm_options: Any,
    ) -> "list[EmbeddingRequestOutput]":
        """The embedding of each prompt, `outputs[i].outputs.embedding`: by default the normalised last hidden state.

        Raises TypeError or ValueError before anything is queued if a prompt or a parameter is bad.
        """
        with extra("extras/embedding", "LLM.embed"):
            from nanovllm.extras.embedding.params import PoolingParams
        own_options(vllm_options, ("prompts", "pooling_params", "use_tqdm"), "request")
        return self._complete(
            self._check(prompts, pooling_params, None, "pooling_params", PoolingParams, PoolingParams()), use_tqdm
        )

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

    def beam_search(
        self, prompts: Prompt | Collection[Prompt], params: "BeamSearchParams", use_tqdm: bool = False
    ) -> "list[BeamSearchOutput]":
        """The likeliest completions of each prompt that a search of `params.beam_width` beams finds, best first."""
        with extra("extras/beam_search", "LLM.beam_search"):
            from nanovllm.extras.beam_search.params import BeamSearchParams
        if params is None:
            raise TypeError("params must be a BeamSearchParams, got None")
        return self._complete(self._check(prompts, params, None, "params", BeamSearchParams), use_tqdm)

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

    def get_metrics(self) -> "list[Metric]":
        """Counters, gauges and histograms, by vLLM's names with the prefix `nanovllm:`."""
        with extra("extras/vllm", "LLM.get_metrics"):
            from nanovllm.extras.vllm.metrics import make_metrics
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
        self,
        prompts: Any,
        params: Any,
        priority: Any,
        name: str = "sampling_params",
        kind: type = SamplingParams,
        default: Any = None,
    ) -> Requests:
        """Requests that can be served; raises if one cannot. Parameters are of `kind`, or None for `default`."""
        processor, prompt_list = self.engine.input_processor, as_list(prompts)
        wanted = spread(name, params, kind, default or processor.default_sampling_params, len(prompt_list))
        priorities = spread("priority", priority, int, 0, len(prompt_list))
        # now: a stream is queued when it is first read
        taken = {id(one): processor.take_params(one) for one in wanted}
        requests: Requests = {}
        for prompt, one, rank in zip(prompt_list, wanted, priorities, strict=True):
            text, token_ids = processor.encode(prompt, taken[id(one)])
            encoded = {"prompt": text, "prompt_token_ids": token_ids}
            requests[str(next(self._request_ids))] = encoded, taken[id(one)], rank
        return requests

    def _stream(self, requests: Requests, stream: bool = True) -> Generator[Any, None, None]:
        """Queues its requests when the first output is asked for: a stream that is never read has queued nothing.

        However it ends, none of its requests stays in the engine.
        """
        queued: list[str] = []
        try:
            for request_id, request in requests.items():
                queued.append(request_id)  # before it is: an interrupt can come between any two lines
                self.engine.add_request(request_id, *request, stream)
            yield from self._outputs(queued)
        except GeneratorExit:  # the caller has closed the iterator
            self._abort(queued)
            self.engine.settle()
            raise
        except BaseException:
            self._abort(queued)
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
