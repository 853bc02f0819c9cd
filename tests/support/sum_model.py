"""A model that says the sum of all tokens, and the worker's step around it on any platform."""

from __future__ import annotations

import torch

from engine.config.engine import ResolvedConfig
from engine.config.model import ModelConfig
from engine.kv.layout import PagedKV, one_group
from engine.layers.batch import Hidden
from engine.worker.platform.host import CpuPlatform, HostPlatform
from engine.worker.runner import Driver, Runner
from engine.worker.worker import make_machine
from support.simulate import Run, make_scheduler

VOCAB, BLOCK, LONGEST = 50, 4, 64
POISON, NAN = 40, 41
CPU, EAGER, GRAPHS, FEW = None, (), (1, 2, 4, 16), (3,)
"""Ways to run steps: on the CPU, or the sizes of recorded steps."""


class SumModel:
    """Says the sum of all tokens so far, modulo 40; chokes on POISON and answers NAN with NaN.

    The KV cache holds each token itself, so the sum comes through the block table.
    """

    cache_spec = (PagedKV(num_kv_heads=1, head_dim=1),)
    vocab_size = VOCAB
    dtype = torch.float32
    can_be_recorded = True
    has_own_products = False
    lowest_id = 0
    calls = 0

    def __init__(self):
        self.num_rows = []  # of each forward pass, with padding

    def forward(self, batch, kv):
        return Hidden(self.last_layer(self.lower_layers(batch, kv), batch, kv))

    def lower_layers(self, batch, kv):
        self.calls += 1
        self.num_rows.append(len(batch.input_ids))
        self.lowest_id = min(self.lowest_id, int(batch.input_ids.min()))
        if (batch.input_ids == POISON).any():
            raise RuntimeError("bad token 40")
        return batch.input_ids.float()[:, None]

    def last_layer(self, stream, batch, kv):
        assert torch.equal(stream[:, 0], batch.input_ids.float())
        (meta,) = batch.attn
        keys = kv[0][:, 0, 0, :, 0]
        real = meta.slots >= 0
        places = meta.slots[real]
        keys[places // BLOCK, places % BLOCK] = batch.input_ids[real].float()
        hidden = torch.zeros(len(batch.input_ids), 1)
        for s in range(len(meta.seq_lens)):
            first, last = int(meta.query_start[s]), int(meta.query_start[s + 1])
            length = int(meta.seq_lens[s])
            used = meta.block_tables[s, : -(-length // BLOCK)].long()
            sums = keys[used].reshape(-1)[:length].cumsum(0)[length - (last - first) :]
            hidden[first : first + len(sums), 0] = sums
            hidden[first:last][batch.input_ids[first:last] == NAN] = torch.nan
        return hidden if batch.wanted is None else hidden[batch.wanted.rows]

    has_largest = False

    def largest(self, hidden):
        return None

    def logits(self, hidden, out=None):
        logits = torch.zeros(len(hidden), VOCAB) if out is None else out.zero_()
        for row, total in enumerate(hidden[:, 0]):
            logits[row, int(total.nan_to_num()) % 40] = 5.0
            logits[row] += total * 0
        return logits


class NoisyModel(SumModel):
    """Many tokens are likely; which, depends on the sum of all before."""

    def logits(self, hidden, out=None):
        logits = torch.zeros(len(hidden), VOCAB) if out is None else out.zero_()
        ids = torch.arange(VOCAB)
        for row, total in enumerate(hidden[:, 0]):
            logits[row] = 1.5 * torch.sin(0.7 * ids * (1 + int(total.nan_to_num()) % 11))
        logits[:, 40:] = -torch.inf  # the bad ones
        return logits


def make_run(
    depth: int = 1, sizes=CPU, num_blocks: int = 64, model=None, features=(), **options
) -> Run:
    """Scheduler and worker around a model; ``sizes`` of recorded steps, or the CPU for itself.
    ``mixed_sizes``: of recorded forward passes. ``make_feature``: from the worker's configuration.
    """
    mixed_sizes = options.pop("mixed_sizes", () if sizes is CPU or not sizes else (6, 16, 40))
    num_drafts = options.pop("num_drafts", 0)
    make_feature = options.pop("make_feature", None)
    options = {"max_model_len": LONGEST, "num_steps_in_flight": depth, **options}
    scheduler = make_scheduler(num_blocks=num_blocks, block_size=BLOCK, **options)
    config = ResolvedConfig(
        model=ModelConfig(model="m"), scheduler=scheduler.config, block_size=BLOCK
    )
    platform = CpuPlatform() if sizes is CPU else HostPlatform()
    made_here = [] if make_feature is None else [make_feature(config)]
    features = (*features, *made_here)
    layers = SumModel.cache_spec
    layout = one_group(layers, BLOCK)
    machine = make_machine(model or SumModel(), platform, config, layers, layout, features)
    machine.kv.append(torch.full((num_blocks, 2, 1, BLOCK, 1), torch.nan))
    machine.kv[0][0] = 0  # the null block takes what nobody reads
    for feature in made_here:
        feature.attach(machine)
        feature.allocate(num_blocks)
    runner = Runner(machine, LONGEST)
    sched = scheduler.config
    decode_sizes = [size for size in sizes or () if size <= sched.max_num_seqs]
    mixed_sizes = [size for size in mixed_sizes if size <= sched.max_num_batched_tokens]
    runner.capture(decode_sizes, mixed_sizes)
    return Run(scheduler, Driver(runner), depth, num_drafts=num_drafts)
