"""A core without a model that takes pictures, whose content comes in messages of their own."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from engine.config.engine import EngineConfig
from engine.core.engine_core import EngineCore
from engine.core.inproc_client import InprocClient
from engine.mm.arrivals import Arrivals
from engine.mm.decide import EncoderBudget
from engine.mm.store import PixelStore
from support.data_plane import FeatureWorker
from support.simulate import make_scheduler
from support.spawned import BLOCK_SIZE, NUM_BLOCKS, VOCAB_SIZE, FakeBuild


@dataclass(frozen=True)
class SeeingBuild(FakeBuild):
    """A build for one core, whose parts tests look at."""

    store: PixelStore = field(default_factory=PixelStore)

    def __call__(
        self, config: EngineConfig, *, clock: Callable[[], float] = time.monotonic
    ) -> InprocClient:
        text = super().__call__(config, clock=clock)
        budget = EncoderBudget(256, 256, arrivals=Arrivals(self.store.drop), store=self.store)
        scheduler = make_scheduler(
            num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, resources=[budget], clock=clock
        )
        worker = FeatureWorker(NUM_BLOCKS, BLOCK_SIZE, vocab_size=VOCAB_SIZE, cache_size=256)
        decided = replace(text.decided, capabilities=("media",))
        return InprocClient(EngineCore(scheduler, worker), decided, clock=clock, media=self.store)
