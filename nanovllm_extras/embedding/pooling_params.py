"""`LLM.embed`, what it takes in place of `SamplingParams`, and what it returns; names are vLLM's."""

import copy
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from nanovllm.checks import check_bool, check_choice
from nanovllm.prompts import Prompt
from nanovllm_extras.embedding.embedding_outputs import EmbeddingRequestOutput
from nanovllm_extras.embedding.embedding_request import make_request
from nanovllm_extras.engine.input_processor import InputProcessor
from nanovllm_extras.engine.llm_methods import CallsEngine
from nanovllm_extras.execution.parts import Parts
from nanovllm_extras.options.option_checks import takes_vllm_options, translate_options
from nanovllm_extras.requests.full_request import Request

POOLINGS = ("last", "mean")


@takes_vllm_options("pooling")
@dataclass
class PoolingParams:
    """A bad value raises a TypeError or ValueError that names the field, the value and what is allowed."""

    pooling: str = "last"
    """`last` takes the hidden state of the prompt's last token, `mean` the mean over all of its tokens."""
    normalize: bool = True
    """Whether the embedding is divided by its length (its Euclidean norm)."""

    def __post_init__(self) -> None:
        check_choice("pooling", self.pooling, POOLINGS)
        check_bool("normalize", self.normalize)

    def checked(self, parts: Parts) -> "PoolingParams":
        """Return an equal object, checked again, because fields may have been assigned."""
        checked = copy.copy(self)
        checked.__post_init__()
        return checked

    def make_request(self, processor: InputProcessor, request_id: str, prompt: Prompt, priority: int) -> Request:
        text, token_ids = processor.encode(prompt)
        return make_request(request_id, text, token_ids, self.pooling, self.normalize, priority)


def embed(
    self: CallsEngine,
    prompts: Prompt | Collection[Prompt],
    pooling_params: PoolingParams | Collection[PoolingParams] | None = None,
    use_tqdm: bool | Callable[..., object] = True,
    lora_request: Any = None,
    **vllm_options: object,
) -> list[EmbeddingRequestOutput]:
    """Return each prompt's embedding, `outputs[i].outputs.embedding`: by default the normalised last hidden state.

    A method of `LLM`. lora_request: as in `LLM.generate`.
    Raises TypeError or ValueError before anything is queued if a prompt or a parameter is bad.
    """
    translate_options(vllm_options, ("prompts", "pooling_params", "use_tqdm", "lora_request"), "pooling")
    params = PoolingParams() if pooling_params is None else pooling_params
    requests = self._check(prompts, params, None, "pooling_params", PoolingParams, lora_request)
    return self._complete(requests, use_tqdm)
