"""Memory of recorded steps: parts in use never overlap, and what is let go can be taken again."""

import random

from kernels.cpu.recording import Arena


def test_parts_in_use_never_overlap(seed: int) -> None:
    draw, arena, used = random.Random(seed), Arena(4096), {}
    for _ in range(3000):
        if used and draw.random() < 0.48:
            start = draw.choice(list(used))
            arena.drop(start)
            used[start][1] -= 1
            if not used[start][1]:
                del used[start]
            continue
        size = draw.choice((1, 8, 64, 65, 500))
        start = arena.take(size)
        if start is None:
            continue
        assert start % 64 == 0 and start + size <= 4096
        for other, (length, _) in used.items():
            assert start + size <= other or other + length <= start
        used[start] = [size, 0]
        for _ in range(draw.choice((1, 1, 2))):  # a tensor, and another look at a part of it
            assert arena.hold(start + draw.randrange(size)) == start
            used[start][1] += 1
    for start, (_, times) in used.items():
        for _ in range(times):
            arena.drop(start)
    assert arena.take(4096) == 0


def test_there_may_be_no_room() -> None:
    arena = Arena(100)
    assert arena.take(101) is None
    assert arena.take(60) == 0 and arena.take(36) == 64 and arena.take(1) is None
