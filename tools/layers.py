"""The layers of the house: what each holds, and the picture of them in `docs/architecture.md`.

    python tools/layers.py        # writes the picture anew

Imports go to lower layers only; packages of one layer do not import each other.
`tests/test_architecture.py` holds both.
"""

from pathlib import Path

LAYERS: tuple[tuple[tuple[str, ...], str], ...] = (
    (("errors", "assets", "moved"), "what all share; the model in the box; former module names"),
    (("config", "messages"), "options, given and decided; what crosses a border"),
    (
        ("ipc", "text", "hub", "kernels"),
        "how bytes travel; text <-> tokens; models by name; operations on tensors",
    ),
    (("kv", "parallel", "observe"), "who owns which KV block; logs and step logs"),
    (("sched", "layers"), "who computes how many tokens; the blocks a model is made of"),
    (("models", "sample"), "the decoder and its families; logits -> tokens"),
    (("worker",), "one device: plans -> tensors -> tokens"),
    (
        ("spec", "structured", "lora", "mm", "kv_transfer", "pooling"),
        "features: what each asks of the scheduler, what it computes in the worker",
    ),
    (("core",), "scheduler + executor = a step; the one place that names concrete classes"),
    (("rpc",), "a core in another process: its server and its clients"),
    (("frontend",), "requests and outputs on the user's side of the core"),
    (("llm_engine", "async_engine"), "step by step, and for tasks"),
    (("llm",), "the shortest way in: prompts to outputs"),
    (("server",), "the APIs of OpenAI and Anthropic"),
    (("cli",), "the `metronome` command"),
    (("policylab.verify",), "the policy lab: what a scheduler must keep"),
    (("policylab.sim", "policylab.simulated"), "policies on a virtual clock"),
    (("policylab.cli",), "the lab's commands"),
)
PACKAGES = ("kernels", "policylab")  # next to `engine`, to which all other names belong
PLANNED = ("parallel", "pooling")  # places that are kept, with nothing in them yet
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
