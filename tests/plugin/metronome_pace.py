"""What a package of somebody else's may bring: a policy, a loop of its own, a resource."""

from engine.sched import Fit, Policy, Resource, Scheduler


class Pace(Policy):
    """Who has the fewest outputs so far goes first; prompts go in chunks of ``chunk_tokens``."""

    api_version = 1
    dynamic = True

    def __init__(self, chunk_tokens: int = 64) -> None:
        self.chunk_tokens = chunk_tokens

    def rank(self, req, view):
        return (req.num_output, req.arrival)

    def chunk(self, req, num_tokens, view):
        return min(num_tokens, self.chunk_tokens)


class OldestHalf(Scheduler):
    """A loop of its own: decodes first, then prompts, the older half of the budget's takers."""

    def schedule(self):
        step = self.begin_step()
        takers = sorted(self.view.running, key=lambda req: req.num_uncomputed)
        takers += list(self.view.waiting)[: 1 + len(self.view.waiting) // 2]
        for req in takers:
            if step.is_full:
                break
            if not step.offer(req):
                continue
            num_tokens = self.tokens_for(req, step).num_tokens
            if num_tokens > 0 and self.secure(req, num_tokens, step):
                self.grant(req, num_tokens, step)
        return self.seal(step)


class OneLongPrompt(Resource):
    """At most one prompt of more than 16 tokens is computed at a time."""

    api_version = 1
    name = "long prompts"

    def __init__(self) -> None:
        self.holder = None

    def fit(self, req, num_tokens, step):
        is_free = req.num_prompt <= 16 or self.holder in (None, req)
        return Fit(num_tokens) if is_free else Fit(0)

    def take(self, req, num_tokens, step):
        if req.num_prompt > 16:
            self.holder = req

    def release(self, req):
        if self.holder is req:
            self.holder = None


class FromTheFuture(Pace):
    api_version = 99


class ResourceFromTheFuture(OneLongPrompt):
    api_version = 99


class NoPolicy:
    """Installed under the right group, and nothing of the kind."""
