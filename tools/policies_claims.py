"""What the sources of shipped policies claim, as far as a figure of `docs/policies.md` says it too.

A claim is a figure, the scene (`policies_scenes`) where it is to be seen, and in which direction it
is to differ from that of fcfs. Its words are the source's, with the source's measure and numbers.
`lacks` names what a source has and we do not; `costs` says why a policy computes much again or
serves little, where it does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

LOWER, HIGHER = "lower", "higher"


class Claim(NamedTuple):
    """A claim: a figure differs from that of fcfs in this direction."""

    scene: str
    figure: str
    direction: str
    words: str


@dataclass(frozen=True, kw_only=True)
class Claims:
    """What the page has on a policy besides figures."""

    claims: tuple[Claim, ...]
    lacks: str = ""
    costs: str = ""


IN_A_TIER = (
    "with --kv-tiers 'host(blocks=100000,load=1e-5)' it is loaded instead, and {} % are computed "
    "again"
)
GUESSED = (
    "where lengths are only guessed, a new request looks shorter than many that run, so requests "
    "evict each other again and again, and each time their KV is dropped"
)

CLAIMS: dict[str, Claims] = {
    "adapter-clustering": Claims(
        claims=(
            Claim("adapters", "adapter_loads", LOWER, "fewer adapters at a time in a batch"),
            Claim("adapters", "ttft.mean", LOWER, "so batches are larger and waits shorter"),
        ),
        lacks="memory that adapters and KV share, so that fewer adapters leave more room",
    ),
    "andes": Claims(
        claims=(
            Claim("log-uniform", "ttft.mean", LOWER, "readers wait less: QoE up to 4.7 times"),
            Claim("tiers", "readers", HIGHER, "more readers who never wait for a token"),
        ),
        costs="a request that is ahead of its reader is evicted while others wait, at most once, "
        "and then its KV is dropped; " + IN_A_TIER.format("up to 1"),
    ),
    "blendserve": Claims(
        claims=(Claim("offline", "tokens_per_second", HIGHER, "throughput up to 1.44 times"),),
        lacks="an overlap of computing and reading memory: the cost of a step here is their sum, "
        "so there is little to gain from a mix",
    ),
    "conserve": Claims(
        claims=(
            Claim("tiers", "ttft of chat", LOWER, "online tail latency 2.9 times lower"),
            Claim("tiers", "attainment", HIGHER, "online promises kept next to offline work"),
        ),
    ),
    "continuum": Claims(
        claims=(
            Claim("bursts", "program.mean", LOWER, "agents end sooner: KV stays over tool calls"),
            Claim("bursts", "prefix_hits", HIGHER, "so less is computed again after them"),
        ),
        lacks="a time to live for each kind of tool, and an offload of KV to the host",
    ),
    "dlpm": Claims(
        claims=(
            Claim("agents", "gap", LOWER, "users are served alike within a bound"),
            Claim("agents", "prefix_hits", HIGHER, "while most of the cache's hits are kept"),
            Claim("two-users", "gap", LOWER, "users are served alike within a bound"),
        ),
    ),
    "early-rejection": Claims(
        claims=(
            Claim("tiers", "goodput", HIGHER, "more requests within their promises"),
            Claim("tiers", "ttft.mean", LOWER, "no work for what would come too late"),
        ),
        costs="it refuses what would come too late, so that there is less to serve",
    ),
    "edf": Claims(
        claims=(Claim("tiers", "attainment", HIGHER, "no order keeps more deadlines, if all can"),),
    ),
    "fastserve": Claims(
        claims=(
            Claim("log-uniform", "ttft.mean", LOWER, "no head-of-line blocking by long jobs"),
            Claim("log-uniform", "slowdown.mean", LOWER, "short jobs end early, unknown lengths"),
        ),
        costs="levels take seats from each other all the time, and each time KV is dropped; "
        + IN_A_TIER.format("1 to 2"),
    ),
    "hrrn": Claims(
        claims=(Claim("log-uniform", "ttft.mean", LOWER, "short prompts first, none starves"),),
    ),
    "k-lpm": Claims(
        claims=(
            Claim("agents", "prefix_hits", HIGHER, "most of the hits of longest-match order"),
            Claim("agents", "ttft.mean", LOWER, "lower time to first token than in order"),
        ),
    ),
    "least-computed": Claims(
        claims=(Claim("offline", "recomputed", LOWER, "24 to 30 % less computed again"),),
    ),
    "lpm": Claims(
        claims=(
            Claim("agents", "prefix_hits", HIGHER, "cached prefixes are used before they go"),
            Claim("agents", "ttft.mean", LOWER, "so less is to be computed before a first token"),
        ),
    ),
    "ltr": Claims(
        claims=(
            Claim("log-uniform", "ttft.mean", LOWER, "chat latency 2.8 times lower"),
            Claim("log-uniform", "normalised.mean", LOWER, "the same, for each output token"),
        ),
        costs="a request that has waited for 200 steps goes first for 50 tokens, so where all wait "
        "they evict each other in turn, and each time their KV is dropped; "
        + IN_A_TIER.format("about 1"),
    ),
    "mc-sf": Claims(
        claims=(
            Claim("log-uniform", "e2e.mean", LOWER, "mean latency within 5 % of the best possible"),
            Claim("log-uniform", "recomputed", LOWER, "memory is never overcommitted"),
        ),
    ),
    "past-future": Claims(
        claims=(
            Claim("offline", "recomputed", LOWER, "hardly any eviction, memory nearly full"),
            Claim("offline", "tpot.p99", LOWER, "so no stalls: goodput 2 to 3 times"),
        ),
    ),
    "plas": Claims(
        claims=(Claim("agents", "programs", LOWER, "4 to 15 times the programs, as fast"),),
    ),
    "prefill-first": Claims(
        claims=(
            Claim("azure-conv", "ttft.p50", LOWER, "prompts first: the shortest time to a token"),
            Claim("azure-conv", "itl.p99", HIGHER, "at the price of stalls between tokens"),
        ),
    ),
    "priority": Claims(
        claims=(Claim("tiers", "ttft of chat", LOWER, "the higher class does not wait"),),
    ),
    "qoserve": Claims(
        claims=(Claim("tiers", "attainment", HIGHER, "a tenth of the violations at overload"),),
    ),
    "residual-sjf": Claims(
        claims=(Claim("log-uniform", "ttft.mean", LOWER, "shorter prompts first"),),
    ),
    "sarathi": Claims(
        claims=(Claim("azure-conv", "itl.p99", LOWER, "no prompt stalls a decode"),),
    ),
    "slai": Claims(
        claims=(
            Claim("azure-conv", "ttft.p50", LOWER, "median time to first token 53 % lower"),
            Claim("tiers", "attainment", HIGHER, "26 % more capacity within promises"),
        ),
    ),
    "trail": Claims(
        claims=(
            Claim("log-uniform", "ttft.mean", LOWER, "the shortest remainders first"),
            Claim("log-uniform", "normalised.mean", LOWER, "lower mean latency"),
        ),
        costs=GUESSED + "; " + IN_A_TIER.format("up to 0.2"),
    ),
    "vtc": Claims(
        claims=(
            Claim("two-users", "gap", LOWER, "users are served alike within a bound"),
            Claim("two-users", "ttft of calm", LOWER, "who asks little does not wait"),
        ),
    ),
}
