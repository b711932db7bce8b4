"""`EngineArgs` where vLLM has it: `from nanovllm.engine.arg_utils import EngineArgs`."""

from typing import TYPE_CHECKING

from nanovllm.checks import names_of_extras

if TYPE_CHECKING:
    from nanovllm.extras.vllm.engine_args import AsyncEngineArgs as AsyncEngineArgs
    from nanovllm.extras.vllm.engine_args import EngineArgs as EngineArgs
else:
    __getattr__ = names_of_extras(__name__, {"vllm/engine_args": ("AsyncEngineArgs", "EngineArgs")})
