"""When blocks run out, the requests with the longest prompts are preempted, whatever their rank."""

from engine.sched import Policy


class LongestOut(Policy):
    """In order of arrival; the longest prompts are preempted until all others have blocks."""

    def rank(self, req, view):
        return (req.arrival,)

    def evict(self, view):
        kv, gone = view.kv, []
        needs = {
            req: kv.missing(req, req.num_computed + req.num_uncomputed) for req in view.running
        }
        short = sum(needs.values()) - kv.num_free
        for req in sorted(needs, key=lambda req: -req.num_prompt)[:-1]:
            if short > 0:
                gone.append(req)
                short -= needs[req] + sum(map(bool, kv.held(req)))  # 0: outside a window
        return gone
