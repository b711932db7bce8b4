"""List vLLM's options in tables, which `vllm_options.py` reads. docs/options.md describes them.

Each option of vLLM that `Config` does not have is in one of the tables: it has another name here, or it has no effect
here, or only its neutral value is accepted. The error for another value says what to use instead. Names and neutral
values are those of vLLM 0.32, and of older versions if examples still use them.
"""

from collections.abc import Mapping
from typing import NamedTuple

RENAMED: Mapping[str, str] = {
    "num_gpu_blocks_override": "num_kv_blocks",
    "async_scheduling": "enable_overlap",
}
"""vLLM's name of an option of the engine -> nanovllm's name."""

RENAMED_OF: Mapping[str, Mapping[str, str]] = {"engine": RENAMED, "pooling": {"use_activation": "normalize"}}
"""Kind of options -> vLLM's name -> nanovllm's name."""

VALUES: Mapping[str, Mapping[str | None, object]] = {
    "dtype": {None: "auto", "half": "float16", "float": "float32"},
    "device": {None: "auto"},
    "load_format": {None: "auto"},
    "kv_cache_dtype": {None: "auto", "fp8_e4m3": "fp8", "half": "float16", "float": "float32"},
    "gpu_memory_utilization": {None: 0.9},
    "enforce_eager": {None: False},
    "skip_tokenizer_init": {None: False},
    "scheduling_policy": {None: "fcfs"},
    "long_prefill_token_threshold": {None: 0},
    "quantization": {"None": None},
    "attention_backend": {None: "auto", "FLASH_ATTN": "flash_attn", "TRITON_ATTN": "triton", "CPU_ATTN": "cpu"},
    "enable_prefix_caching": {None: True},
    "max_num_seqs": {None: 256},
    "generation_config": {None: "auto"},
    "reasoning_parser": {None: "qwen3", "": "qwen3"},
    "seed": {None: 0},
    "tensor_parallel_size": {None: 1},
    "nnodes": {None: 1},
    "node_rank": {None: 0},
    "master_addr": {None: "127.0.0.1"},
    "master_port": {None: 29501},
    "disable_hybrid_kv_cache_manager": {None: False},
    "enable_lora": {None: False},
    "max_loras": {None: 1},
    "max_lora_rank": {None: 16},
}
"""Option of the engine -> vLLM's value -> nanovllm's value with the same meaning."""


def each(names: str, *values: object) -> dict[str, tuple[object, ...]]:
    """Return a dict with the same values for each of the names."""
    return dict.fromkeys(names.split(), values)


def off(names: str) -> dict[str, tuple[object, ...]]:
    """Return options whose neutral values are None, False, zero and empty."""
    return each(names, None, False, 0, 0.0, "", {}, [], (), set())


WITHOUT_EFFECT = frozenset(
    each(
        "_api_process_count _api_process_rank aggregate_engine_logging all2all_backend code_revision "
        "cpu_distributed_timeout_seconds cuda_graph_sizes cudagraph_capture_sizes cudagraph_metrics "
        "custom_histogram_buckets data_parallel_backend dbo_decode_token_threshold dbo_prefill_token_threshold "
        "dcp_comm_backend dcp_q_replicate disable_cascade_attn disable_custom_all_reduce "
        "disable_log_stats disable_nccl_for_dp_synchronization "
        "distributed_timeout_seconds dp_sync_interval ec_manager_config elastic_ep_max_dp_size "
        "enable_flashinfer_autotune enable_logging_iteration_details enable_mamba_cache_stochastic_rounding "
        "enable_mamba_shared_prefix_checkpoint enable_mfu_metrics enable_mm_processor_stats enable_shm_tensor_arena "
        "eplb_config expert_placement_strategy fail_on_environ_validation fault_tolerance_config "
        "gdn_prefill_backend ignore_patterns ir_op_priority jit_monitor_mode jit_monitor_verbose kda_decode_backend "
        "kda_prefill_backend kernel_config kv_cache_metrics kv_cache_metrics_sample kv_offloading_backend "
        "kv_sharing_fast_prefill linear_backend lora_dtype mamba_backend mamba_block_size mamba_cache_dtype "
        "mamba_cache_mode mamba_cache_philox_rounds mamba_config mamba_ssm_cache_dtype mamba_ssu_algorithm "
        "max_context_len_to_capture max_cudagraph_capture_size max_logprobs "
        "max_lora_cls_labels max_parallel_loading_workers max_seq_len_to_capture "
        "mm_device_do_normalize mm_encoder_attn_backend mm_encoder_attn_dtype mm_encoder_fp8_scale_path "
        "mm_encoder_fp8_scale_save_margin mm_encoder_fp8_scale_save_path mm_encoder_tp_mode mm_hasher_algorithm "
        "mm_ipc_gpu_memory_gb mm_processor_cache_gb mm_processor_cache_type mm_processor_device "
        "mm_shm_cache_max_object_size_mb mm_tensor_ipc moe_backend offload_backend offload_num_in_group "
        "offload_prefetch_step optimization_level per_request_spec_decode_metrics performance_mode "
        "prefix_cache_retention_interval prefix_caching_hash_algo prefix_match_unit pt_load_map_location "
        "renderer_num_workers replayssm_buffer_len safetensors_load_strategy safetensors_prefetch_block_size "
        "safetensors_prefetch_num_threads scheduler_reserve_full_isl show_hidden_metrics_for_version "
        "sleep_mode_offload_cudagraph sleep_preserve_parameter_names sparse_indexer_topk_backend swa_bounded_replay "
        "ubatch_size use_fp64_gumbel use_replayssm use_tqdm_on_load use_v2_block_manager video_pruning_method "
        "video_pruning_rate"
    )
)
"""Options that are accepted with any value, because outputs and limits do not depend on them. They control logging, or
features that are disabled here, or internals of vLLM."""

WITHOUT_EFFECT_OF = {"engine": WITHOUT_EFFECT, "pooling": frozenset({"output_kind"})}
"""Kind of options -> options that are accepted with any value. An embedding has one output."""


class Refused(NamedTuple):
    """Options that are accepted only with their neutral values."""

    instead: str
    """What to use instead: the end of the error message."""
    neutral: Mapping[str, tuple[object, ...]]
    """Option -> the values that are accepted."""


ENGINE_OPTIONS = (
    Refused(
        "only tensor parallel ranks are supported: use tensor_parallel_size, or run one engine for each device",
        {
            **each(
                "pipeline_parallel_size data_parallel_size prefill_context_parallel_size "
                "decode_context_parallel_size dcp_kv_cache_interleave_size",
                None,
                1,
            ),
            **off(
                "data_parallel_rank data_parallel_start_rank data_parallel_size_local data_parallel_address "
                "data_parallel_rpc_port data_parallel_hybrid_lb data_parallel_external_lb enable_dbo "
                "data_parallel_multi_port_external_lb enable_expert_parallel enable_eplb enable_elastic_ep "
                "enable_batch_sharded_sampling enable_ep_weight_filter numa_bind numa_bind_nodes numa_bind_cpus "
                "device_ids fully_sharded_loras ray_workers_use_nsight enable_hc_sp cp_kv_cache_interleave_size "
                "enable_fault_tolerance enable_nccl_comm_suspend"
            ),
            "distributed_executor_backend": (None, "uni", "mp"),
        },
    ),
    Refused(
        "no code of a checkpoint is run: see docs/adding_a_model.md for a model that is not built in",
        {
            "trust_remote_code": (None, False),
            "model_impl": (None, "auto", "vllm"),
            "config_format": (None, "auto", "hf"),
            "tokenizer_mode": (None, "auto", "hf"),
            **off("model_class_overrides worker_extension_cls additional_config hf_config_path"),
            "worker_cls": (None, "auto"),
        },
    ),
    Refused(
        "use quantization='int8' or 'int4' for weights, and kv_cache_dtype='fp8' or 'int8' for K and V",
        off(
            "quantization_config allow_deprecated_quantization calculate_kv_scales load_in_4bit "
            "kv_cache_dtype_skip_layers qlora_adapter_name_or_path"
        ),
    ),
    Refused(
        "adapters are those of PEFT, for linear layers: see docs/lora.md",
        {
            **off(
                "lora_target_modules default_mm_loras enable_tower_connector_lora "
                "specialize_active_lora enable_mixed_moe_lora_format enable_moe_shared_loras lora_extra_vocab_size "
                "enable_prompt_adapter"
            ),
        },
    ),
    Refused(
        "use speculative_config={'method': …, 'num_speculative_tokens': …}",
        off("speculative_model num_speculative_tokens spec_method spec_model spec_tokens"),
    ),
    Refused("tokens are sampled one after the other", off("diffusion_config")),
    Refused(
        "use preemption_mode='swap' with swap_space_bytes, or kv_offloading_size and kv_transfer_config",
        off("swap_space kv_events_config ec_transfer_config"),
    ),
    Refused(
        "weights stay on the device: lower gpu_memory_utilization, max_num_seqs or max_model_len if memory is short",
        {
            **off(
                "cpu_offload_gb cpu_offload_params offload_group_size offload_params enable_sleep_mode "
                "enable_cumem_allocator weight_transfer_config"
            ),
        },
    ),
    Refused(
        "prompts are text or token ids",
        off(
            "limit_mm_per_prompt mm_processor_kwargs media_io_kwargs allowed_local_media_path allowed_media_domains "
            "enable_mm_embeds enable_prompt_embeds interleave_mm_strings language_model_only mm_encoder_only "
            "disable_mm_preprocessor_cache disable_chunked_mm_input skip_mm_profiling io_processor_plugin"
        ),
    ),
    Refused(
        "the model generates text; LLM.embed computes embeddings with any model",
        {
            "runner": (None, "auto", "generate", "pooling"),
            "task": (None, "auto", "generate"),
            "convert": (None, "auto", "none"),
            **off("pooler_config override_pooler_config"),
        },
    ),
    Refused(
        "long prompts are always computed in chunks of at most max_num_batched_tokens",
        {
            "enable_chunked_prefill": (None, True),
            "max_num_partial_prefills": (None, 1),
            "max_long_partial_prefills": (None, 1),
            "long_prefill_token_threshold_adaptive": (None, False),
            "prefill_schedule_interval": (None, 1),
        },
    ),
    Refused("each step is scheduled separately", {"num_scheduler_steps": (None, 1), "stream_interval": (None, 1)}),
    Refused("use max_num_seqs and max_num_batched_tokens", off("max_num_active_seqs max_num_scheduled_tokens")),
    Refused(
        "use enforce_eager, enable_cuda_graphs and attention_backend",
        {
            **off("compilation_config attention_config"),
        },
    ),
    Refused("use hf_overrides", off("rope_scaling rope_theta")),
    Refused("a model's sliding windows are always used", {"disable_sliding_window": (None, False)}),
    Refused(
        "use SamplingParams(logits_processors=[…]), a list of callables for each request",
        off("logits_processors logits_processor_pattern"),
    ),
    Refused("log-probabilities are always those of the raw logits", {"logprobs_mode": (None, "raw_logprobs")}),
    Refused("use torch.profiler, or benchmarks/decode_profile.py", off("profiler_config collect_detailed_traces")),
    Refused("configure Python's `logging`", off("logging_config log_level log_config_file otlp_traces_endpoint")),
    Refused("use the hub's own settings: HF_HOME, and `hf auth login`", off("download_dir hf_token")),
    Refused(
        "only vLLM has it",
        off(
            "model_weights model_loader_extra_config engram_config watermark_config watermark enable_trace_replay "
            "enable_return_routed_experts return_sampling_mask aux_output_config reasoning_config "
            "enable_layerwise_nvtx_tracing structured_outputs_config guided_decoding_backend"
        ),
    ),
)
"""Options of `LLM(…)` and `EngineArgs`."""

SERVER_OPTIONS = (
    Refused(
        "this is an option of `nanovllm serve`",
        {
            **off(
                "served_model_name reasoning_parser_plugin max_num_queued_reqs max_num_queued_tokens "
                "shutdown_timeout tokens_only enable_auto_tool_choice tool_call_parser"
            ),
            **each("enable_log_requests disable_log_requests", None, True, False),
        },
    ),
)
"""Options of the server. `LLM(…)` and `EngineArgs` also accept them with their neutral values."""

REQUEST_OPTIONS = (
    Refused(
        "use SamplingParams(truncate_prompt_tokens=…), or token ids instead of text",
        off("tokenization_kwargs"),
    ),
    Refused('put it into the prompt: {"prompt": "…", "cache_salt": "…"}', off("cache_salt")),
    Refused(
        "message content is text, or a list of text parts",
        {"chat_template_content_format": (None, "auto", "string", "openai")},
    ),
    Refused("use enable_prefix_caching, or a cache_salt for each prompt", off("skip_reading_prefix_cache")),
    Refused("running requests keep their blocks", off("reset_running_requests")),
    Refused("the prefix cache and the K/V store are always reset together", {"reset_connector": (None, False)}),
    Refused("use n, or LLM.beam_search", {**off("use_beam_search early_stopping"), "best_of": (None, 1)}),
    Refused("use logprobs=-1 and select", off("logprob_token_ids prompt_logprob_token_ids prompt_logprob_start")),
    Refused("use logits_processors", off("repetition_detection")),
    Refused("use structured_outputs", off("guided_decoding guided_options_request")),
    Refused("log-probabilities are lists of dicts", off("flat_logprobs")),
    Refused("each token gives a separate output", {"stream_interval": (None, 1)}),
    Refused("only vLLM has it", {**off("watermarking trace_decode_token_ids routed_experts_prompt_start skip_clone")}),
    Refused("give it to the method, such as LLM.generate(…, lora_request=…)", off("lora_request")),
    Refused(
        "prompts are text or token ids",
        off(
            "multi_modal_data multi_modal_uuids mm_processor_kwargs media_io_kwargs prompt_embeds token_type_ids "
            "encoder_prompt encoder_decoder_prompt"
        ),
    ),
)
"""Options of `SamplingParams`, prompts, and the methods of `LLM`."""

BEAM_SEARCH_OPTIONS = (
    Refused("beams are ranked by the model's own probabilities", {"temperature": (0, 0.0)}),
    Refused("stop strings do not end a beam", off("include_stop_str_in_output")),
    Refused("give it to the method, such as LLM.generate(…, lora_request=…)", off("lora_request")),
    Refused("all beams run together: use max_num_seqs", off("concurrency_limit")),
    Refused("prompts are text or token ids", off("mm_processor_kwargs")),
)
"""Options of `BeamSearchParams` and `LLM.beam_search`."""

POOLING_OPTIONS = (
    Refused("cut the vectors, or use dimensions of /v1/embeddings", {"dimensions": (None,)}),
    Refused("LLM.embed computes embeddings", {"task": (None, "embed")}),
    Refused("use token ids instead of text", {"truncate_prompt_tokens": (None,)}),
    Refused("use normalize", off("softmax activation")),
    Refused("use enable_prefix_caching, or a cache_salt for each prompt", off("skip_reading_prefix_cache")),
    Refused(
        "only vLLM has it",
        off(
            "step_tag_id returned_token_ids requires_token_ids extra_kwargs extra_args additional_data "
            "late_interaction_params"
        ),
    ),
    Refused("give it to the method, such as LLM.generate(…, lora_request=…)", off("lora_request")),
    Refused("use token ids instead of text", off("tokenization_kwargs")),
    Refused("use the arguments of LLM.score", off("pooling_params")),
    Refused("use chat_template of LLM", off("chat_template")),
)
"""Options of `PoolingParams`, `LLM.embed` and `LLM.score`."""

STRUCTURED_OPTIONS = (
    Refused("use grammar", {"structural_tag": (None,)}),
    Refused(
        "objects with properties are closed; use additionalProperties in the schema",
        {"disable_additional_properties": (None, False)},
    ),
    Refused(
        "there is one library for all forms",
        {"disable_fallback": (None, False), "_backend": (None,), "_backend_was_auto": (None, False)},
    ),
)
"""Options of `StructuredOutputsParams`."""

OPTIONS: Mapping[str, tuple[Refused, ...]] = {
    "engine": (*ENGINE_OPTIONS, *SERVER_OPTIONS),
    "request": REQUEST_OPTIONS,
    "beam search": BEAM_SEARCH_OPTIONS,
    "pooling": POOLING_OPTIONS,
    "structured outputs": STRUCTURED_OPTIONS,
}
"""Kind of options -> vLLM's options that are accepted only with their neutral values."""
