"""Options that users of vLLM know and that are called otherwise here, or are none: the way out."""

from __future__ import annotations

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
}


def refusal(name: str) -> str | None:
    """Why there is no such option, and what to do; ``None`` for a name that is not known."""
    way_out = FOREIGN.get(name)
    return None if way_out is None else f"there is no option {name!r} here: {way_out}"
