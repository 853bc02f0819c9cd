"""Trains the model in the box and writes its directory.

    python tools/train_box_model.py --output engine/assets/metronome-3m

Needs torch, tokenizers and safetensors; reads no text but that of the running Python. The same
Python, libraries, seed and thread count give the same model. Writes a usable model every
`--save-every` steps and a checkpoint to go on from with `--resume`.
"""

import argparse
import json
import math
import platform
import random
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from box_batches import Stage, batches, held_out_batches
from box_card import Facts, write_card
from box_corpus import read_corpus
from box_documents import Documents, conversations, split, with_more_core
from box_network import Network, Shape, llama_config
from box_tokenizer import (
    END_OF_TEXT_ID,
    TURN_END_ID,
    render_chat,
    save_tokenizer,
    train_tokenizer,
)
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor

TOKENS_PER_STEP = 2048
SHORT_WINDOW, LONG_WINDOW = 256, 2048
LONG_SHARE = 1 / 24
WARMUP_STEPS = 100
DECAY_SHARE = 0.4
PEAK_MUON_LR, PEAK_ADAMW_LR = 6e-3, 3e-3


def main() -> None:
    args = parse_arguments()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    train_side, held_side = split(read_corpus())
    tokenizer = train_tokenizer(_tokenizer_texts(train_side, args.seed))
    shape = Shape()
    _write_settings(args.output, shape, tokenizer)
    if args.steps == 0:
        return
    held_out = held_out_batches(held_side, tokenizer)
    trainer = Trainer(Network(shape), args)
    if args.resume:
        trainer.load()
    stream = batches(stages(args.steps, train_side), tokenizer, args.seed)
    trainer.run(stream, held_out)
    write_card(args.output, _facts(trainer, tokenizer, train_side, held_out))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--output", type=Path, required=True, help="directory of the model")
    parser.add_argument("--checkpoint", type=Path, default=Path("build/box_model.pt"))
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint")
    parser.add_argument("--steps", type=int, default=3600, help="0 writes the tokenizer alone")
    parser.add_argument("--save-every", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    return parser.parse_args()


def stages(steps: int, documents: Documents) -> list[Stage]:
    """Everything, more of the core as the rate decays, at last everything in whole contexts."""
    decay_steps, long_steps = round(steps * DECAY_SHARE), round(steps * LONG_SHARE)
    short_rows, long_rows = TOKENS_PER_STEP // SHORT_WINDOW, TOKENS_PER_STEP // LONG_WINDOW
    return [
        Stage(steps - decay_steps, short_rows, SHORT_WINDOW, documents),
        Stage(decay_steps - long_steps, short_rows, SHORT_WINDOW, with_more_core(documents)),
        Stage(long_steps, long_rows, LONG_WINDOW, documents),
    ]


def lr_share(step: int, steps: int) -> float:
    """Share of the peak learning rates: warm-up, constant, then down to nothing as 1 - sqrt.

    Nothing but the last `DECAY_SHARE` depends on `steps`, so a run may be made longer or shorter
    with `--resume` until it gets there.
    """
    decay_steps = round(steps * DECAY_SHARE)
    into_decay = max(0, step + 1 - (steps - decay_steps)) / (decay_steps + 1)
    return min(1.0, (step + 1) / WARMUP_STEPS) * (1.0 - math.sqrt(into_decay))


class Trainer:
    """Network, optimizers and progress of one run."""

    def __init__(self, network: Network, args: argparse.Namespace) -> None:
        self.network = network
        self.args = args
        self.step = 0
        self.seconds = 0.0
        self.lowest: dict[str, float] = {}
        named = list(network.named_parameters())
        inner = [p for name, p in named if p.dim() == 2 and "embed" not in name]
        outer = [p for name, p in named if p.dim() == 1 or "embed" in name]
        self.optimizers: tuple[torch.optim.Optimizer, ...] = (
            torch.optim.Muon(inner, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(outer, weight_decay=0.0, betas=(0.9, 0.95), fused=True),
        )

    def run(self, stream: Iterator[Tensor], held_out: dict[str, Tensor]) -> None:
        """Trains to the last step; reports and saves on the way."""
        for _ in range(self.step):
            next(stream)
        begun, losses = time.perf_counter() - self.seconds, []
        for ids in stream:
            losses.append(self._train_on(ids))
            self.step += 1
            self.seconds = time.perf_counter() - begun
            if self.step % 20 == 0:
                mean = sum(losses) / len(losses)
                print(f"step {self.step} loss {mean:.4f} {self.seconds:.0f} s", flush=True)
                losses = []
            if self.step % self.args.save_every == 0 or self.step == self.args.steps:
                self.judge(held_out)
                self.save()

    def judge(self, held_out: dict[str, Tensor]) -> dict[str, float]:
        """Held-out losses now; the lowest so far are kept."""
        losses = {name: self.loss_on(ids) for name, ids in held_out.items()}
        self.lowest = {
            name: min(loss, self.lowest.get(name, loss)) for name, loss in losses.items()
        }
        print({name: round(loss, 4) for name, loss in losses.items()}, flush=True)
        return losses

    def _train_on(self, ids: Tensor) -> float:
        share = lr_share(self.step, self.args.steps)
        for optimizer, peak in zip(self.optimizers, (PEAK_MUON_LR, PEAK_ADAMW_LR), strict=True):
            for group in optimizer.param_groups:
                group["lr"] = share * peak
        with torch.autocast("cpu", torch.bfloat16):
            loss = self.network(ids)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.network.parameters(), 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        return loss.item()

    @torch.no_grad()
    def loss_on(self, ids: Tensor) -> float:
        """Mean loss in float32 of the network as exported, its weights rounded to bfloat16."""
        kept = {name: p.clone() for name, p in self.network.named_parameters()}
        for p in self.network.parameters():
            p.copy_(p.bfloat16())
        losses = [self.network(row) for row in ids.split(1)]
        for name, p in self.network.named_parameters():
            p.copy_(kept[name])
        return float(sum(losses)) / len(losses)

    def save(self) -> None:
        """Writes the weights in bfloat16, and the checkpoint."""
        weights = {
            name: weight.detach().to(torch.bfloat16).contiguous()
            for name, weight in self.network.state_dict().items()
        }
        save_file(weights, self.args.output / "model.safetensors", metadata={"format": "pt"})
        self.args.checkpoint.parent.mkdir(parents=True, exist_ok=True)
        state = {
            "step": self.step,
            "seconds": self.seconds,
            "lowest": self.lowest,
            "network": self.network.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
        }
        torch.save(state, self.args.checkpoint)

    def load(self) -> None:
        """Takes up where the checkpoint was written."""
        state = torch.load(self.args.checkpoint, weights_only=True)
        self.step, self.seconds, self.lowest = state["step"], state["seconds"], state["lowest"]
        self.network.load_state_dict(state["network"])
        for optimizer, moments in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(moments)


def _tokenizer_texts(documents: Documents, seed: int) -> list[str]:
    chats = conversations(documents.entries, random.Random(seed))
    return documents.texts + [render_chat(chat) for chat in chats[::2]]


def _write_settings(output: Path, shape: Shape, tokenizer: Tokenizer) -> None:
    """Writes every file but the weights and the card."""
    output.mkdir(parents=True, exist_ok=True)
    save_tokenizer(tokenizer, output, shape.max_position)
    config = llama_config(shape, eos_token_id=TURN_END_ID, pad_token_id=END_OF_TEXT_ID)
    generation = {
        "eos_token_id": [TURN_END_ID, END_OF_TEXT_ID],
        "pad_token_id": END_OF_TEXT_ID,
    }
    for name, values in (("config", config), ("generation_config", generation)):
        (output / f"{name}.json").write_text(json.dumps(values, indent=2) + "\n")


def _facts(
    trainer: Trainer, tokenizer: Tokenizer, train_side: Documents, held_out: dict[str, Tensor]
) -> Facts:
    args = trainer.args
    texts = tokenizer.encode_batch(train_side.texts)
    return Facts(
        num_parameters=sum(p.numel() for p in trainer.network.parameters()),
        num_texts=len(train_side.texts),
        num_text_chars=sum(map(len, train_side.texts)),
        num_text_tokens=sum(len(item.ids) for item in texts),
        num_entries=len(train_side.entries),
        held_out_tokens={name: ids.numel() for name, ids in held_out.items()},
        held_out_loss=trainer.judge(held_out),
        lowest_held_out_loss=trainer.lowest,
        unigram_loss=_unigram_loss([i for item in texts for i in item.ids], held_out["text"]),
        steps=trainer.step,
        tokens_per_step=TOKENS_PER_STEP,
        peak_lrs=(PEAK_MUON_LR, PEAK_ADAMW_LR),
        seed=args.seed,
        threads=args.threads,
        minutes=trainer.seconds / 60,
        python=platform.python_version(),
        torch=torch.__version__.split("+")[0],
    )


def _unigram_loss(train_ids: list[int], held_out: Tensor) -> float:
    """Held-out loss of the training text's token frequencies, every count half a token up."""
    vocab_size = Shape().vocab_size
    counts = torch.bincount(torch.tensor(train_ids), minlength=vocab_size) + 0.5
    return -(counts / counts.sum()).log()[held_out[:, 1:]].mean().item()


if __name__ == "__main__":
    main()
