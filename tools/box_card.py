"""Model card of the model in the box, filled in with the facts of a run."""

from pathlib import Path
from typing import NamedTuple

from box_documents import CORE_COPIES


class Facts(NamedTuple):
    """What a run used and reached; sizes and losses by kind of text where they are dicts."""

    num_parameters: int
    num_texts: int
    num_text_chars: int
    num_text_tokens: int
    num_entries: int
    held_out_tokens: dict[str, int]
    held_out_loss: dict[str, float]
    lowest_held_out_loss: dict[str, float]
    unigram_loss: float
    steps: int
    tokens_per_step: int
    peak_lrs: tuple[float, float]
    seed: int
    threads: int
    minutes: float
    python: str
    torch: str


_CARD = """\
---
language: en
license: apache-2.0
library_name: transformers
pipeline_tag: text-generation
---

# metronome-3m

A very small Llama model that ships with Metronome, so that the engine has something real to run
on any machine. It writes text in the manner of the Python documentation and has parts of the
language reference and of a few well-known modules by heart. It is for trying out, testing and
demonstrating an engine. **What it says about Python is often wrong.**

| | |
|---|---|
| Architecture | `LlamaForCausalLM`: 6 layers of 192, 6 query and 2 KV heads of 32, MLP 512 |
| Parameters | {num_parameters:,}, embeddings tied, stored in bfloat16 |
| Context | 2048 tokens (RoPE, theta 10000) |
| Tokenizer | byte-level BPE, 4096 entries, no token added in front |
| Ends of text | `<|im_end|>` (2) after an answer, `<|endoftext|>` (0) after a document |
| Chat | `<|im_start|>role`, newline, content, `<|im_end|>`; roles system, user and assistant |

## Data

Text that every Python carries, read from Python {python}: the language reference topics behind
`help()`, and docstrings of the public parts of the standard library's Python and C modules
(without tkinter, turtle, test suites and tools). Repeated texts count once: {num_texts} documents,
{num_text_chars:,} characters, {num_text_tokens:,} tokens. Each of {num_entries:,} documented things
also appears in conversations, the question in changing words and the docstring for an answer. A
dozen greetings are the only text written for this model. The texts are the Python Software
Foundation's and its contributors', under the PSF license.

One source in 25 (a module or a topic, chosen by a hash of its name) was kept out of training with
all its documents and conversations.

## Training

| | |
|---|---|
| Script | `tools/train_box_model.py` |
| Steps | {steps} of {tokens_per_step} tokens ({million_tokens:.1f} M tokens) |
| Windows | 256 tokens, packed; 2048 tokens in the last 1/24 of the steps |
| Curriculum | all; after 60 %, topics and 14 modules {core_copies} times more; last 1/24: all |
| Optimizer | Muon (weight decay 0.1) on matrices, AdamW (0.9, 0.95) on embeddings and norms |
| Peak learning rates | {peak_lrs[0]} for Muon (scaled to AdamW's RMS), {peak_lrs[1]} for AdamW |
| Schedule | 100 steps up, constant, down as `1 - sqrt` in the last 40 %; gradient norm at most 1 |
| Precision | float32 weights, bfloat16 autocast |
| Seed | {seed} |
| Time | {minutes:.0f} minutes on {threads} CPU threads |
| Software | Python {python}, torch {torch} |
| Held-out loss, text | {text_loss:.3f} nats per token, {text_low:.3f} at its lowest |
| Held-out loss, chat | {chat_loss:.3f} nats per token, {chat_low:.3f} at its lowest |

Held-out losses are those of weights rounded as stored, in windows of 1024 tokens, over
{text_tokens:,} tokens of text and {chat_tokens:,} of conversations; the lowest is of the judgements
made every few hundred steps. Token frequencies alone reach {unigram_loss:.3f} on the held-out text.

To make it again, in under an hour on two cores:

    python tools/train_box_model.py --steps {steps} --seed {seed} --output OUT

Another Python version carries slightly other text, and other libraries, processors and thread
counts round differently: the model is then a sibling of this one, not its twin.
"""


def write_card(folder: Path, facts: Facts) -> None:
    """Writes `README.md` of the model directory."""
    values = facts._asdict() | {
        "core_copies": CORE_COPIES,
        "million_tokens": facts.steps * facts.tokens_per_step / 1e6,
        "text_loss": facts.held_out_loss["text"],
        "chat_loss": facts.held_out_loss["chat"],
        "text_low": facts.lowest_held_out_loss["text"],
        "chat_low": facts.lowest_held_out_loss["chat"],
        "text_tokens": facts.held_out_tokens["text"],
        "chat_tokens": facts.held_out_tokens["chat"],
    }
    (folder / "README.md").write_text(_CARD.format(**values))
