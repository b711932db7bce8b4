"""LLM: the engine for those who have all prompts at hand and wait for the answers.

Turns the forms that a prompt may have into requests, steps the engine until all are done, and shows a progress bar.
"""

from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from itertools import count
from pathlib import Path
from typing import Any

from tqdm import tqdm

from nanovllm.checks import check_bool
from nanovllm.config import Config
from nanovllm.engine import LLMEngine
from nanovllm.outputs import EngineStats, RequestOutput
from nanovllm.request import Prompt
from nanovllm.sampling_params import SamplingParams

Message = Mapping[str, Any]


class LLM:
    """`LLM(model, **options)`: the options are the fields of `Config`.

    >>> with LLM(TINY_QWEN3) as llm:
    ...     llm.chat([{"role": "user", "content": "What is a block table?"}])[0].outputs[0].text
    """

    def __init__(self, model: str | Path, **options: Any) -> None:
        self._engine: LLMEngine | None = LLMEngine(Config.from_options(model, options))
        self._request_ids = count()

    @property
    def engine(self) -> LLMEngine:
        if self._engine is None:
            raise RuntimeError("this LLM has been shut down; make a new one")
        return self._engine

    def generate(
        self,
        prompts: Prompt | SequenceOf[Prompt],
        sampling_params: SamplingParams | SequenceOf[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Complete all prompts; outputs come in their order.

        prompts: one prompt or a list of them; a prompt is a str, a list of token ids, `{"prompt": str}` or
            `{"prompt_token_ids": list}`.
        sampling_params: one for all, or one for each.
        Raises TypeError or ValueError before anything is queued if any of them is bad.
        """
        check_bool("use_tqdm", use_tqdm)
        engine = self.engine
        prompt_list: list[Any] = [prompts] if is_single_prompt(prompts) else list(prompts)
        params = spread(sampling_params, len(prompt_list))
        encoded = [engine.encode(prompt) for prompt in prompt_list]
        request_ids = [f"generate-{next(self._request_ids)}" for _ in encoded]
        try:
            for request_id, (text, token_ids), one in zip(request_ids, encoded, params, strict=True):
                engine.add_request(request_id, {"prompt": text, "prompt_token_ids": token_ids}, one, stream=False)
            finished = self._run(set(request_ids), use_tqdm)
        except BaseException:  # KeyboardInterrupt too: leave nothing behind
            for request_id in request_ids:
                engine.abort_request(request_id)
            engine.recover()
            raise
        return [finished[request_id] for request_id in request_ids]

    def chat(
        self,
        messages: SequenceOf[Message] | SequenceOf[SequenceOf[Message]],
        sampling_params: SamplingParams | SequenceOf[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Answer one conversation, or each of a list; a message is `{"role": "user", "content": "…"}`."""
        tokenizer = self.get_tokenizer()
        if tokenizer is None or getattr(tokenizer, "chat_template", None) is None:
            raise ValueError(f"{self.engine.folder} has no chat template; use generate")
        if not isinstance(messages, SequenceOf) or isinstance(messages, str) or not messages:
            raise TypeError(f"messages must be a list of messages, or a list of such lists, got {messages!r}")
        conversations: Any = [messages] if isinstance(messages[0], Mapping) else messages
        for conversation in conversations:
            check_messages(conversation)
        texts = [tokenizer.apply_chat_template(c, tokenize=False, add_generation_prompt=True) for c in conversations]
        # the template has written the special tokens already
        ids = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
        prompts = [{"prompt": text, "prompt_token_ids": i} for text, i in zip(texts, ids, strict=True)]
        return self.generate(prompts, sampling_params, use_tqdm)

    def get_tokenizer(self) -> Any:
        """The `transformers` tokenizer of the model, or None if its folder holds none."""
        return self.engine.tokenizer

    def get_stats(self) -> EngineStats:
        return self.engine.get_stats()

    def reset_prefix_cache(self) -> None:
        self.engine.reset_prefix_cache()

    def shutdown(self) -> None:
        """Let go of the model and its cache. Calling it again does nothing."""
        self._engine = None

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def _run(self, request_ids: set[str], use_tqdm: bool) -> dict[str, RequestOutput]:
        """Step until all of `request_ids` are finished; requests of others advance along with them."""
        finished: dict[str, RequestOutput] = {}
        with tqdm(total=len(request_ids), desc="Generating", unit="req", disable=not use_tqdm) as bar:
            num_tokens = 0
            while len(finished) < len(request_ids):
                for output in self.engine.step().outputs:
                    if output.request_id in request_ids and output.finished:
                        finished[output.request_id] = output
                        num_tokens += len(output.outputs[0].token_ids)
                        bar.update()
                bar.set_postfix_str(f"{num_tokens} tokens", refresh=False)
        return finished


def is_single_prompt(prompts: Any) -> bool:
    """[1, 2] is one prompt of token ids; ["a"], [[1, 2]], [{…}] and [] are lists of prompts."""
    if isinstance(prompts, str | Mapping):
        return True
    if isinstance(prompts, bytes) or not hasattr(prompts, "__len__") or not hasattr(prompts, "__getitem__"):
        raise TypeError(f"prompts must be a prompt or a list of prompts, got {type(prompts).__name__}")
    return len(prompts) > 0 and not isinstance(prompts[0], str | Mapping) and not hasattr(prompts[0], "__len__")


def spread(sampling_params: Any, num_prompts: int) -> list[SamplingParams]:
    """One SamplingParams for each prompt."""
    if sampling_params is None:
        return [SamplingParams()] * num_prompts
    if isinstance(sampling_params, SamplingParams):
        return [sampling_params] * num_prompts
    if not isinstance(sampling_params, list | tuple) or not all(isinstance(p, SamplingParams) for p in sampling_params):
        raise TypeError(f"sampling_params must be a SamplingParams, a list of them, or None, got {sampling_params!r}")
    if len(sampling_params) != num_prompts:
        raise ValueError(
            f"there must be one SamplingParams for each prompt, got {len(sampling_params)} for {num_prompts} prompts"
        )
    return list(sampling_params)


def check_messages(conversation: Any) -> None:
    if isinstance(conversation, str | Mapping) or not isinstance(conversation, SequenceOf) or not conversation:
        raise TypeError(f"a conversation must be a list of messages, at least one, got {conversation!r}")
    for message in conversation:
        if not isinstance(message, Mapping) or not {"role", "content"} <= set(message):
            raise TypeError(f"a message must be a dict with role and content, got {message!r}")
