"""Puts media into a case whose content comes later: in any order, twice, not at all, or as an
error.

A separate random generator leaves other cases unchanged."""

from __future__ import annotations

from random import Random

import msgspec

from engine.messages.requests import AddRequest, MediaItem
from policylab.verify.case import Add, Bring, Case, Event, ResetEncoder
from policylab.verify.pictures import BROKEN, DAMAGED, FLAKY, Pictures

edit = msgspec.structs.replace
SHARE = 0.2  # of cases with media whose content comes later
LATE = (0, 0, 1, 2, 5, 12, 30)  # ticks from a request to the content of one of its items


def with_pictures(case: Case, seed: int) -> Case:
    """The case with media whose content comes later, for a part of the seeds."""
    rng = Random(f"pictures of {seed}")
    if rng.random() >= SHARE:
        return case
    return PictureMaker(rng).put_into(case)


class PictureMaker:
    """Draws media items and arrivals of their content."""

    def __init__(self, rng: Random) -> None:
        self.rng = rng
        fails = rng.choice((0.0, 0.0, 0.1, 0.4))
        names = [f"p{index}" for index in range(rng.randint(1, 6))]
        ends = (rng.choice((BROKEN, FLAKY)) if rng.random() < fails else "" for _ in names)
        self.lengths = {
            f"{name}{end}": rng.randint(1, 7) for name, end in zip(names, ends, strict=True)
        }
        self.share = rng.choice((0.3, 0.8, 1.0))  # of requests with media
        self.never = rng.choice((0.0, 0.05, 0.3))  # shares of items
        self.resets = rng.choice((0.0, 0.0, 0.1))  # for each event
        self.wrong = rng.choice((0.0, 0.05, 0.3))

    def put_into(self, case: Case) -> Case:
        rng = self.rng
        needs = {name: size for name, size in case.setup.needs.items() if name != "encoder"}
        setup = edit(
            case.setup,
            needs={**needs, Pictures.name: rng.randint(3, 14)},
            encoder_cache_size=rng.randint(4, 24),
            whole_media=rng.random() < 0.3,
        )
        events: list[Event] = []
        for event in case.events:
            if isinstance(event, Add):
                media = self.media(event.request) if rng.random() < self.share else []
                event = edit(event, request=edit(event.request, media=media))
                events += [event, *self.arrivals(event)]
            else:
                events.append(event)
            if rng.random() < self.resets:
                events.append(ResetEncoder(event.at))
        return edit(case, setup=setup, events=sorted(events, key=lambda event: event.at))

    def media(self, request: AddRequest) -> list[MediaItem]:
        """Up to four items that do not overlap, sometimes several with the same content."""
        items: list[MediaItem] = []
        offset = self.rng.randrange(5)
        while len(items) < 4:
            key = self.rng.choice(list(self.lengths))
            if offset + self.lengths[key] > len(request.prompt_token_ids):
                break
            items.append(MediaItem(offset, self.lengths[key], key))
            offset += self.lengths[key] + self.rng.choice((0, 0, 1, 6))
        return items

    def arrivals(self, add: Add) -> list[Bring]:
        """When the content of a request's media comes, and for which requests."""
        rng, brought = self.rng, []
        for key in dict.fromkeys(item.hash for item in add.request.media):
            if rng.random() < self.never:
                continue
            ids = [add.request.request_id]
            if rng.random() < 0.2:
                ids.append(str(rng.randrange(40)))  # it may use the item, have ended or be unknown
            error = ""
            if rng.random() < self.wrong:
                error = rng.choice((DAMAGED, f"{key!r} of {ids[0]} is no picture"))
            for _ in range(rng.choice((1, 1, 1, 2))):
                brought.append(Bring(add.at + rng.choice(LATE), key, ids, error))
        return brought
