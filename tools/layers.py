"""The layers of packages, and the picture of them in `docs/architecture.md`.

    python tools/layers.py        # writes the picture

Imports go to lower layers only; packages of one layer do not import each other.
`tests/test_architecture.py` checks both.
"""

from pathlib import Path

LAYERS: tuple[tuple[tuple[str, ...], str], ...] = (
    (("errors", "assets", "moved"), "exceptions; the built-in model; aliases of former modules"),
    (("config", "messages"), "options; messages between processes"),
    (("gguf",), "model directories made from GGUF files"),
    (
        ("ipc", "text", "hub", "kernels"),
        "sockets, processes; tokenizers; model downloads; tensor operations",
    ),
    (
        ("kv", "parallel", "observe", "pictures"),
        "KV blocks; operations of ranks; logs and step logs; pictures in prompts",
    ),
    (
        ("sched", "layers", "cluster.nodes"),
        "the scheduler; layers of models; nodes of a Ray cluster",
    ),
    (("models", "sample"), "the decoder and model families; sampling"),
    (("worker",), "computes plans on one device"),
    (
        ("spec", "structured", "lora", "mm", "kv_transfer", "states", "pooling"),
        "features, each with a scheduler's half and a worker's half",
    ),
    (("core",), "the step loop; builds all parts from a configuration"),
    (("rpc",), "cores in other processes: server and clients"),
    (("cluster.cores",), "cores on the nodes of a Ray cluster"),
    (("frontend",), "requests and outputs on the user's side"),
    (("llm_engine", "async_engine"), "engines for single steps and for asyncio"),
    (("llm",), "the `LLM` class: prompts to outputs"),
    (("server",), "the APIs of OpenAI, Anthropic and Ollama"),
    (("cli", "cluster"), "the `metronome` command; deployments of Ray Serve"),
    (("policylab.verify",), "checks of policies and schedulers"),
    (("policylab.sim", "policylab.simulated"), "simulation on a virtual clock"),
    (("policylab.cli", "policylab.bench"), "commands of the policy lab; load tests of servers"),
)
PACKAGES = ("kernels", "policylab")  # next to `engine`, to which all other names belong
PLANNED = ("pooling",)  # places that are kept, with nothing in them yet
TARGET = Path(__file__).resolve().parent.parent / "docs" / "architecture.md"
BEGIN, END = "<!-- layers -->\n```\n", "```\n<!-- layers end -->\n"


def module_name(name: str) -> str:
    """The dotted name of what ``LAYERS`` names."""
    return name if name.partition(".")[0] in PACKAGES else f"engine.{name}"


def picture() -> str:
    """The highest layer first."""
    lines = []
    for level, (names, text) in reversed(list(enumerate(LAYERS))):
        built = " ".join(name for name in names if name not in PLANNED)
        lines.append(f"{level:2}  {built:36}  {text}\n")
    return "".join(lines)


def document() -> str:
    """`docs/architecture.md` with the picture as it should be."""
    written = TARGET.read_text(encoding="utf-8")
    before, _, rest = written.partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + BEGIN + picture() + END + after


if __name__ == "__main__":
    TARGET.write_text(document(), encoding="utf-8")
