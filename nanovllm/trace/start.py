"""An engine whose run is recorded. `LLM(…, trace="run.jsonl")` and the server start theirs here."""

from contextlib import ExitStack
from pathlib import Path
from typing import Any

from nanovllm.config import Config
from nanovllm.engine.engine import LLMEngine
from nanovllm.trace.recorder import Recorder, Sink
from nanovllm.trace.sinks import to_sink


def start_engine(config: Config, trace: str | Path | Sink | None, on_exit: ExitStack) -> LLMEngine:
    """An engine; its run is recorded in the file `trace`, or written to that sink, until `on_exit` closes it.

    Raises ValueError or TypeError, before the model is loaded, if the file cannot be written.
    """
    if trace is None:
        return LLMEngine(config)
    return start_recorded_engine(config, to_sink(trace), on_exit)


def start_recorded_engine(config: Config, sink: Sink, on_exit: ExitStack) -> LLMEngine:
    """An engine whose run is written to `sink`, until `on_exit` closes it."""
    recorder = Recorder(sink)
    try:
        engine = LLMEngine(config, recorder)
    except BaseException:
        sink.close()
        raise
    if engine.tokenizer is not None:
        recorder.decode = lambda token_id: engine_text(engine.tokenizer, token_id)
    recorder.begin(describe(engine))
    on_exit.callback(recorder.close)
    return engine


def engine_text(tokenizer: Any, token_id: int) -> str:
    """The text of one token; part of a character is shown as �."""
    return tokenizer.decode([token_id])


def describe(engine: LLMEngine) -> dict[str, Any]:
    """The limits that the scheduler keeps, and what computes."""
    config, policy = engine.config, engine.config.scheduling_policy
    return {
        "model": Path(config.model).name,
        "max_num_seqs": config.max_num_seqs,
        "max_num_batched_tokens": engine.max_num_batched_tokens,
        "max_model_len": engine.max_model_len,
        "long_prefill_token_threshold": config.long_prefill_token_threshold,
        "sliding_window": engine.model_config.widest_window,  # None if a layer sees all tokens
        "scheduling_policy": policy if isinstance(policy, str) else getattr(policy, "__name__", repr(policy)),
        "enable_prefix_caching": config.enable_prefix_caching,
        "preemption_mode": config.preemption_mode,
        "num_swap_blocks": engine.num_swap_blocks,
        "enable_overlap": engine.enable_overlap,
        "description": engine.description,
    }
