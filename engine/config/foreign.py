"""Options of vLLM that have another name here, or do not exist, with the way out."""

from __future__ import annotations

# In Python and, as JSON, on the command line.
_NGRAM = 'speculative_config={{"method": "ngram", "num_speculative_tokens": 4{}}}'
_NO_DRAFT_MODELS = "there are no draft models, drafts are looked up in the request's own tokens"

FOREIGN: dict[str, str] = {
    "max_num_queued_reqs": "set max_waiting_requests, which counts those that wait and not those "
    "that run",
    "max_num_queued_tokens": "set max_waiting_tokens, which counts the prompt tokens of those that "
    "wait",
    "max_num_active_seqs": "lower max_num_seqs, or let a policy say how many may run "
    "(Limits(max_seqs=...), as sarathi does)",
    "log_stats": "statistics are made when they are asked for; disable_log_stats=True leaves the "
    "line about them out of the log",
    "num_gpu_blocks_override": "set num_kv_blocks",
    "scheduler_reserve_full_isl": "a request starts only if its whole prompt fits, always; "
    "watermark says how many blocks it is to leave free",
    "num_speculative_tokens": f"it is a key of speculative_config: {_NGRAM.format('')}",
    "speculative_model": f"{_NO_DRAFT_MODELS}: {_NGRAM.format('')}",
    "ngram_prompt_lookup_max": "it is the key 'prompt_lookup_max' of speculative_config: "
    + _NGRAM.format(', "prompt_lookup_max": 4'),
    "ngram_prompt_lookup_min": "it is the key 'prompt_lookup_min' of speculative_config: "
    + _NGRAM.format(', "prompt_lookup_min": 2'),
    "prompt_lookup_max": "it is a key of speculative_config: "
    + _NGRAM.format(', "prompt_lookup_max": 4'),
    "prompt_lookup_min": "it is a key of speculative_config: "
    + _NGRAM.format(', "prompt_lookup_min": 2'),
    "speculative_disable_by_batch_size": "drafts are verified in batches of any size; leave it "
    "out, or leave out speculative_config where batches are large",
    "num_lookahead_slots": "room for drafts follows from num_speculative_tokens of "
    "speculative_config; leave it out",
    "speculative_draft_tensor_parallel_size": f"{_NO_DRAFT_MODELS}; leave it out",
}


def refusal(name: str) -> str | None:
    """Why there is no such option, and what to do; ``None`` for a name that is not known."""
    way_out = FOREIGN.get(name)
    return None if way_out is None else f"there is no option {name!r} here: {way_out}"
