"""Options of vLLM and llama.cpp that have another name here or do not exist, each with advice on
what to do. ``docs/coming-from.md`` has the most used ones."""

from __future__ import annotations

_NGRAM = 'speculative_config={{"method": "ngram", "num_speculative_tokens": 4{}}}'
_DRAFT_MODEL = (
    'speculative_config={"method": "draft_model", "model": "...", "num_speculative_tokens": 4}'
)

# For Python and, in hyphens, the command line.
FOREIGN: dict[str, str] = {
    "max_num_queued_reqs": "set max_waiting_requests, which does not count running requests",
    "max_num_queued_tokens": "set max_waiting_tokens, which counts waiting prompt tokens",
    "max_num_active_seqs": "lower max_num_seqs, or use a policy that limits running requests "
    "(Limits(max_seqs=...), as sarathi does)",
    **dict.fromkeys(("max_concurrent_requests", "max_running_requests"), "set max_num_seqs"),
    "log_stats": "statistics are always available; disable_log_stats=True removes their line from "
    "the log",
    "survive_core_death": "set on_core_death: other cores always go on without one that has died",
    "num_gpu_blocks_override": "set num_kv_blocks",
    "scheduler_reserve_full_isl": "a request only starts if its whole prompt fits; watermark "
    "sets how many blocks must stay free",
    "num_speculative_tokens": f"it is a key of speculative_config: {_NGRAM.format('')}",
    "speculative_model": f"it is the key 'model' of speculative_config: {_DRAFT_MODEL}",
    "ngram_prompt_lookup_max": "it is the key 'prompt_lookup_max' of speculative_config: "
    + _NGRAM.format(', "prompt_lookup_max": 4'),
    "ngram_prompt_lookup_min": "it is the key 'prompt_lookup_min' of speculative_config: "
    + _NGRAM.format(', "prompt_lookup_min": 2'),
    "prompt_lookup_max": "it is a key of speculative_config: "
    + _NGRAM.format(', "prompt_lookup_max": 4'),
    "prompt_lookup_min": "it is a key of speculative_config: "
    + _NGRAM.format(', "prompt_lookup_min": 2'),
    "speculative_disable_by_batch_size": "drafts are verified in batches of any size; leave it "
    "out, or leave out speculative_config for large batches",
    "num_lookahead_slots": "room for drafts follows from num_speculative_tokens of "
    "speculative_config; leave it out",
    "task": "set runner and convert; requests may choose among the model's tasks",
    "override_pooler_config": "set pooler_config",
    "speculative_draft_tensor_parallel_size": "each rank has the whole draft model; leave it out",
}

# Short forms.
FOREIGN |= {
    "tp": "set tensor_parallel_size (-tp)",
    "pp": "set pipeline_parallel_size (-pp)",
    "dp": "set data_parallel_size (-dp)",
}

# llama.cpp's, also in their short forms.
FOREIGN |= {
    "alias": "set served_model_name",
    "embedding": "set runner to pooling",
    "grammar": "requests have it: structured_outputs",
    "hf_repo": "set model to owner/name:TYPE, as in owner/name:Q4_K_M",
    "json_schema": "requests have it: response_format, or structured_outputs",
    "lora": "set enable_lora and lora_modules",
    "m": "set model, or give its path alone",
    "n_predict": "requests have it: max_tokens",
    "pooling": "set pooler_config",
    **dict.fromkeys(("c", "ctx_size"), "set max_model_len"),
    **dict.fromkeys(("np", "parallel"), "set max_num_seqs"),
    **dict.fromkeys(("t", "threads"), "set num_threads"),
    **dict.fromkeys(("batch_size", "ubatch_size"), "set max_num_batched_tokens"),
    **dict.fromkeys(("cache_type_k", "cache_type_v"), "set kv_cache_dtype, for keys and values"),
    **dict.fromkeys(
        ("model_draft", "draft_max"), f"it is a key of speculative_config: {_DRAFT_MODEL}"
    ),
    **dict.fromkeys(
        ("n_gpu_layers", "gpu_layers", "ngl"),
        "no layer is on a CPU next to a GPU; leave it out, or set device",
    ),
    **dict.fromkeys(
        ("tensor_split", "ts", "split_mode", "sm"),
        "set tensor_parallel_size, whose ranks have equal parts, or pipeline_parallel_size and "
        "pipeline_layer_split",
    ),
    **dict.fromkeys(("main_gpu", "mg"), "set CUDA_VISIBLE_DEVICES, whose first GPU is used first"),
    **dict.fromkeys(
        ("flash_attn", "fa", "cont_batching", "jinja", "mlock", "no_mmap", "metrics", "slots"),
        "it is always so, or has no use here; leave it out",
    ),
}

_SIZES = (
    "a model runs on several devices by tensor_parallel_size, pipeline_parallel_size and "
    "data_parallel_size; leave it out"
)
_NODES = (
    "distributed_executor_backend='ray' places the ranks of a model on several machines, "
    "data_parallel_backend='ray' whole cores; leave it out"
)
_LORA = "adapters keep their type and rank, and tokens of their own are refused; leave it out"
_NO_MEDIA = "pictures come with the request, and have no such option; leave it out"
_FAMILY = "the chat template determines the format of tool calls and thinking; leave it out"
_GRAMMARS = "each request can choose its grammar library with backend; leave it out"
_WEIGHTS_STAY = "weights stay in the memory of their device; lower num_kv_blocks to save memory"
_KV_STORES = (
    "kv_offloading_size and kv_offload_dir keep KV outside the pool, kv_transfer_config takes "
    "stores of Metronome; leave it out"
)
_GPU_ONLY = "only enforce_eager and cudagraph_capture_sizes control CUDA graphs; leave it out"
_MODEL_FILES = "the values of the model's config.json apply; change them in a copy of the directory"
_LOG = (
    "log_level sets how much is logged, --request-log of metronome serve what is logged per "
    "request; leave it out"
)
_SERVER = "the server is one process without this switch; leave it out"

# Names that share a reason.
for _reason, _names in {
    _SIZES: "enable_expert_parallel decode_context_parallel_size prefill_context_parallel_size "
    "max_parallel_loading_workers disable_custom_all_reduce worker_cls worker_extension_cls "
    "enable_eplb enable_dbo fully_sharded_loras all2all_backend placement_group",
    _NODES: "nnodes node_rank master_addr master_port data_parallel_rank data_parallel_size_local "
    "data_parallel_address data_parallel_rpc_port data_parallel_start_rank "
    "data_parallel_hybrid_lb data_parallel_external_lb",
    _LORA: "lora_dtype lora_extra_vocab_size enable_lora_bias specialize_active_lora "
    "lora_target_modules enable_tower_connector_lora default_mm_loras",
    _NO_MEDIA: "media_io_kwargs "
    "interleave_mm_strings skip_mm_profiling enable_mm_embeds mm_encoder_tp_mode "
    "language_model_only",
    _FAMILY: "enable_auto_tool_choice tool_call_parser tool_parser_plugin reasoning_parser "
    "enable_reasoning reasoning_parser_plugin chat_template_content_format response_role",
    _GRAMMARS: "guided_decoding_backend structured_outputs_config "
    "guided_decoding_disable_fallback guided_decoding_disable_any_whitespace",
    _WEIGHTS_STAY: "swap_space cpu_offload_gb enable_sleep_mode",
    _KV_STORES: "kv_offloading_backend ec_transfer_config",
    _GPU_ONLY: "compilation_config max_seq_len_to_capture optimization_level cuda_graph_sizes",
    _MODEL_FILES: "hf_overrides hf_config_path config_format rope_scaling rope_theta "
    "disable_sliding_window code_revision disable_cascade_attn tokenizer_mode",
    _LOG: "disable_log_requests enable_log_requests uvicorn_log_level max_log_len log_config_file "
    "disable_uvicorn_access_log enable_log_outputs",
    _SERVER: "api_server_count headless middleware root_path enable_request_id_headers "
    "disable_frontend_multiprocessing disable_fastapi_docs enable_server_load_tracking "
    "enable_prompt_tokens_details enable_force_include_usage tool_server ssl_cert_reqs "
    "return_tokens_as_token_ids enable_ssl_refresh",
}.items():
    FOREIGN |= dict.fromkeys(_names.split(), _reason)


def refusal(name: str, shown: str | None = None) -> str | None:
    """Explain why an option does not exist and what to do; ``None`` for an unknown name.

    shown: the name as the user wrote it.
    """
    way_out = FOREIGN.get(name)
    return None if way_out is None else f"there is no option {shown or name!r} here: {way_out}"
