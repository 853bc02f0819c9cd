"""Canaries: bugs as somebody might write them. The simulation must find every one, or tests where
nothing of the place is simulated.

Each replaces one place of the source; `tools/canaries.py` plants them one at a time in a copy.
"""

from __future__ import annotations

from typing import NamedTuple


class Canary(NamedTuple):
    """A bug: in ``file``, ``old`` (which is there exactly once) becomes ``new``.

    ``tests``: the file of tests that find it; empty: the simulation does."""

    name: str
    file: str
    old: str
    new: str
    tests: str = ""


POOL, CACHE, HASHING = "kv/block_pool.py", "kv/block_pool.py", "kv/prefix_index.py"
KV, TABLES = "kv/manager.py", "kv/tables.py"
SCHEDULER, STEP = "sched/scheduler.py", "sched/step/"
SETTLE, APPEND, BULK = STEP + "settle.py", STEP + "settle.py", STEP + "decodes.py"
COLUMNS, ROSTER, WAITS = STEP + "outputs.py", "sched/roster.py", "sched/roster.py"
BUILDER = STEP + "builder.py"
RETENTION = "kv/retention.py"
SNAPSHOTS, STATES = "kv/snapshots.py", "states/decide.py"
SLOTS, LIBRARY = "lora/decide.py", "lora/library.py"
SHARING = "tests/unit/test_adapter_sharing.py"
MEDIA, ARRIVALS = "mm/decide.py", "mm/arrivals.py"
GROUP, RANK = "core/group.py", "worker/rank.py"
TIERS, PROMOTIONS = "kv_transfer/tiers.py", "kv/promotions.py"
GROUP_COPIES = "kv_transfer/group_copies.py"
APART = "rpc/apart.py"
WORKER, COPIES = "../policylab/verify/fake.py", "../policylab/verify/fake_states.py"

CANARIES = (
    # blocks
    Canary("skip decref", POOL, "num_refs[block] = refs - 1", "num_refs[block] = refs"),
    Canary("free what others hold", POOL, "if refs > 1:", "if refs > 2:"),
    Canary(
        "free twice",
        KV,
        "        self._give_back(req, allocation)\n        allocation.clear()\n",
        "        self._give_back(req, allocation)\n"
        "        self._give_back(req, allocation)\n        allocation.clear()\n",
    ),
    Canary(
        "keep the hash of a block that is taken",
        POOL,
        "            self.cache.unpublish_each(lost)\n",
        "            pass\n",
    ),
    Canary(
        "adopt a free block and leave it free",
        POOL,
        "                self._unlink(block)\n",
        "",
    ),
    Canary(
        "count a kept block twice as free",
        RETENTION,
        "            self.num_free -= 1\n",
        "            pass\n",
    ),
    Canary(
        "put a new shelf after all others",
        RETENTION,
        "            insort(self._levels, level)\n",
        "            self._levels.append(level)\n",
    ),
    Canary(
        "count blocks that left a window as in use",
        TABLES,
        "            self._num_used[g] -= self._pool.num_free - num_free\n",
        "",
    ),
    Canary(
        "report no evicted blocks to those who follow the cache",
        POOL,
        "                follower.lost(lost)\n",
        "                pass\n",
    ),
    Canary(
        "forget which blocks were evicted",
        POOL,
        "            self.evictions.add_each(lost)\n",
        "            pass\n",
    ),
    Canary(
        "tell the worker a wrong entry",
        TABLES,
        "self._places(sent, len(table))",
        "self._places(sent + 1, len(table) + 1)",
    ),
    Canary(
        "forget that the worker was told",
        TABLES,
        "        allocation.num_sent = len(allocation.blocks)\n",
        "",
    ),
    Canary(
        "let go of a block that a window still reads",
        "config/kv_groups.py",
        "position - self.window + 1",
        "position - self.window + 2",
    ),
    Canary(
        "free the blocks of a chunk that queries are still in",
        "config/kv_groups.py",
        "position // self.window * self.window // block_size",
        "position // block_size",
    ),
    Canary(
        "free a window's block one step early",
        KV,
        "            self.tables.trim(req.row, allocation, _first_query(req))\n",
        "            self.tables.trim(req.row, allocation, upto)\n",
    ),
    Canary(
        "grow a group's table by the change of another",
        TABLES,
        "self._add(row, self._places(sent, len(table)), table[sent:], g)",
        "self._add(row, self._places(sent, len(table)), table[sent:], 0)",
    ),
    Canary(
        "find a prefix whose window is gone",
        "config/kv_groups.py",
        "needed = range(self.first_needed(limit * block_size, block_size), limit)",
        "needed = range(self.first_needed(limit * block_size, block_size) + 1, limit)",
    ),
    Canary(
        "share the blocks of the first group alone",
        TABLES,
        "        for g, table in enumerate(tables):\n            num_free",
        "        for g, table in enumerate(tables[:1]):\n            num_free",
    ),
    Canary(
        "report blocks that left a window in a plan that is not sent",
        BUILDER,
        "is_launched=len(rows) > 0 or bool(roster.freed_slots)",
        "is_launched=True",
    ),
    # the prefix cache
    Canary(
        "drop the salt from the hash",
        HASHING,
        "msgspec.msgpack.encode((content.cache_salt, content.adapter))",
        "msgspec.msgpack.encode((None, content.adapter))",
    ),
    Canary(
        "drop the adapter from the hash",
        HASHING,
        "msgspec.msgpack.encode((content.cache_salt, content.adapter))",
        "msgspec.msgpack.encode((content.cache_salt, None))",
    ),
    Canary(
        "drop media from the hash", HASHING, "        if not content.media:", "        if True:"
    ),
    Canary(
        "take the whole prompt from the cache",
        KV,
        "(len(req.tokens) - 1) // self.block_size if self.caching",
        "len(req.tokens) // self.block_size if self.caching",
    ),
    Canary(
        "empty the cache while blocks are held",
        KV,
        "if self.pool.num_free + self._promotions.num_held != self.num_usable:",
        "if self.pool.num_free == 0:",
    ),
    Canary(
        "leave what a failed row wrote in the cache",
        SETTLE,
        "            self.revoke(req, int(plan.starts[index]))\n",
        "",
    ),
    Canary(
        "let go on who starts from what was wrong",
        SETTLE,
        "        for row in self.kv.revoke(req, start, involved):\n            self.restart(row)\n",
        "        self.kv.revoke(req, start, involved)\n",
    ),
    # budgets and seats
    Canary(
        "one token too many",
        SCHEDULER,
        "most = min(num_left, step.tokens_left - step.num_kept_tokens)",
        "most = min(num_left, step.tokens_left - step.num_kept_tokens + 1)",
    ),
    Canary(
        "let all prompts join those that decode",
        BUILDER,
        "max(size, waiting - spread)",
        "waiting",
    ),
    Canary(
        "lose a seat",
        ROSTER,
        "        self._free_slots.append(slot)\n",
        "",
    ),
    Canary(
        "do not tell the worker of a free seat",
        ROSTER,
        "        self.freed_slots.append(slot)\n",
        "",
    ),
    Canary(
        "decode without a block at its boundary",
        BULK,
        "needs_block = start % kv.block_size == 0 and start >=",
        "needs_block = start % kv.block_size == 0 and start >",
    ),
    Canary(
        "the same in bulk",
        BULK,
        "computed >= kv.num_held[rows] * self._block_size",
        "computed > kv.num_held[rows] * self._block_size",
    ),
    # steps in flight
    Canary(
        "keep the output of a request that was sent back",
        APPEND,
        "table.alive.at[row] and table.generation.at[row] == generation",
        "table.alive.at[row]",
    ),
    Canary(
        "keep the output of a request that has ended",
        APPEND,
        "table.alive.at[row] and table.generation.at[row] == generation",
        "table.generation.at[row] == generation",
    ),
    Canary(
        "the wrong epoch",
        "sched/table.py",
        "        self.generation.at[row] += 1\n        self.num_computed",
        "        self.num_computed",
    ),
    Canary(
        "use a row again while a step in flight names it",
        ROSTER,
        "        if self.table.in_flight.at[req.row] == 0:\n            self.retire(req.row)",
        "        self.retire(req.row)",
    ),
    Canary(
        "run again before the last token is known",
        SCHEDULER,
        "if pending and (is_waiting or req.is_serial):",
        "if pending > 9 and (is_waiting or req.is_serial):",
    ),
    # ends
    Canary(
        "lose an abort", SCHEDULER, "        for req in alive:\n", "        for req in alive[1:]:\n"
    ),
    Canary(
        "forget an end",
        SETTLE,
        "        self._ended.append(End(req, reason, message, code))\n",
        "",
    ),
    Canary(
        "tell no start but the first",
        ROSTER,
        "        self.table.has_output.at[req.row] = 0\n",
        "        self.table.has_output.at[req.row] = req.num_output > 0\n",
    ),
    Canary(
        "tell an end twice",
        SETTLE,
        "        for end in failed:\n            outputs.end(end)\n",
        "        for end in [*failed, *failed]:\n            outputs.end(end)\n",
    ),
    Canary(
        "miss one of several stop tokens",
        APPEND,
        "stop_id == taken[-1] or stop_id == -2:",
        "stop_id == taken[-1]:",
    ),
    Canary(
        "stop before the least number of tokens",
        "sched/step/settle.py",
        "if token in req.stop_ids and num_tokens - req.num_prompt >= req.params.min_tokens:",
        "if token in req.stop_ids:",
    ),
    Canary(
        "tell everything to everybody",
        COLUMNS,
        "[i for i, other in enumerate(clients) if other == client]",
        "[i for i, other in enumerate(clients) if other >= client]",
    ),
    Canary(
        "let a deadline pass",
        SCHEDULER,
        "elif kind is TimerKind.END_BY or req.history.scheduled_time is None:",
        "elif req.history.scheduled_time is None:",
    ),
    # order and progress
    Canary(
        "break the line at its head",
        "sched/step_state.py",
        "        while self.admission_open and self._next < len(waiting):\n"
        "            req = waiting[self._next]\n",
        "        while self.admission_open and self._next < len(waiting):\n"
        "            req = waiting[-1 - self._next]\n",
    ),
    Canary(
        "no ageing",
        "sched/plugins/orders.py",
        "is_young = is_new & (now - columns.arrival_time < max_wait)",
        "is_young = is_new",
    ),
    Canary(
        "evict who was granted tokens in this step",
        "sched/step/preempt.py",
        "if (last := considered[other.row]) != index\n        and other is not req",
        "if (last := considered[other.row]) != -9\n        and other is not req",
    ),
    Canary(
        "forget to compute again after a preemption",
        SETTLE,
        "        self.roster.table.start_from(req.row, 0)\n",
        "",
    ),
    Canary(
        "sleep through the alarm",
        SCHEDULER,
        "            if kind is TimerKind.WAKE:\n                self.wake(req.request_id)\n",
        "            if kind is TimerKind.WAKE:\n                continue\n",
    ),
    Canary(
        "do not evict whom the policy names",
        SCHEDULER,
        "        for req in list(self.guard.evict(view)):\n            self.preempt(req, step)\n",
        "",
    ),
    Canary(
        "compute in a pause",
        SCHEDULER,
        "        if self.pause_state is PauseState.PAUSED_ALL:\n            step.narrow(0)\n",
        "",
    ),
    Canary(
        "leave a token that somebody could use",
        SCHEDULER,
        "            if step.tokens_left <= 0:\n",
        "            if step.tokens_left <= 1:\n",
    ),
    # blocks go by rank
    Canary(
        "offer decodes their tokens first though blocks are short",
        "sched/view.py",
        "return self.by_rank() if self.prompts and self.is_short() else self.decodes_first()",
        "return self.decodes_first()",
    ),
    Canary(
        "grant decodes in bulk though prompts were promised the blocks",
        BULK,
        "            needed += self._view.promised_blocks\n",
        "            needed += 0\n",
    ),
    Canary(
        "the same in columns",
        BULK,
        "np.count_nonzero(needs_block) * kv.num_groups + promised > kv.num_free",
        "np.count_nonzero(needs_block) * kv.num_groups > kv.num_free",
    ),
    Canary(
        "offer urgent newcomers tokens before all that run",
        "sched/policy.py",
        "while urgent is not None and self.outranks(urgent, req):",
        "while urgent is not None:",
    ),
    Canary(
        "leave a piece of a prompt out that does not fit",
        "sched/step/preempt.py",
        "    return min(num_tokens, (room if room > start else room + size) - start)",
        "    return num_tokens",
    ),
    Canary(
        "let drafts take the blocks of others",
        "sched/step/preempt.py",
        "return min(num_tokens, room - start) if view.is_short(num_entries) else num_tokens",
        "return num_tokens",
    ),
    # adapters
    Canary(
        "hash blocks by the name of an adapter, not by its content",
        HASHING,
        "msgspec.msgpack.encode((content.cache_salt, content.adapter))",
        "msgspec.msgpack.encode((content.cache_salt, content.adapter and content.adapter[0]))",
    ),
    Canary(
        "keep block hashes that were made before the adapter was read",
        SCHEDULER,
        "        self.kv.forget_prefix(req)\n",
        "",
    ),
    Canary(
        "give a slot away while requests run with its adapter",
        SLOTS,
        "next(adapter for adapter in self.slot_of if not self._is_kept(adapter))",
        "next(iter(self.slot_of))",
    ),
    Canary(
        "run requests of more adapters than there are slots",
        SLOTS,
        "            if not self._has_free_slot():\n                return Fit(0)\n",
        "",
    ),
    Canary(
        "leave the request parked whose adapter cannot be read",
        SLOTS,
        "                self._scheduler.wake(req.request_id)\n",
        "                if not version.fault:\n"
        "                    self._scheduler.wake(req.request_id)\n",
    ),
    Canary(
        "fail the requests of all adapters if one cannot be read",
        SLOTS,
        "if version is not None and version.fault:",
        "if self.library is not None and self.library.num_failed:",
    ),
    Canary(
        "answer with the adapter that a client has replaced",
        LIBRARY,
        "        self._names[version.name] = version\n        self._next.pop",
        "        self._names.setdefault(version.name, version)\n        self._next.pop",
    ),
    Canary(
        "drop host copies that waiting requests need",
        LIBRARY,
        "return digest in self._needed or digest == arriving",
        "return digest == arriving",
    ),
    Canary(
        "keep an adapter for a request that has ended",
        LIBRARY,
        "        if version.digest:\n            self._unneed(version.digest)\n",
        "",
    ),
    # media whose content comes later
    Canary(
        "compute a picture's tokens before its content has come",
        MEDIA,
        "            upto = awaited\n",
        "            pass\n",
    ),
    Canary(
        "free an encoder output with the plan that reads it",
        MEDIA,
        "                self._last_reads.setdefault(step.index, []).append(use)\n",
        "                self.cache.end(use)\n",
    ),
    Canary(
        "let the error of a picture fail requests of others",
        ARRIVALS,
        "            users = users.intersection(arrival.request_ids)\n",
        "            pass\n",
    ),
    Canary(
        "never end the use of an output by a request that ends early",
        MEDIA,
        "{}).values():\n            self.cache.end(use)\n",
        "{}).values():\n            pass\n",
    ),
    Canary(
        "let a request fail although another brought its picture",
        ARRIVALS,
        "faults is None or key in self._here else",
        "faults is None else",
    ),
    Canary(
        "drop a picture that another request needs",
        ARRIVALS,
        "            if not users:\n                self._users.pop(key, None)\n",
        "            if True:\n                self._users.pop(key, None)\n",
    ),
    Canary(
        "keep the pictures of requests that have ended",
        ARRIVALS,
        "                self._here.discard(key)\n                self._drop(key)\n",
        "                self._here.discard(key)\n",
    ),
    Canary(
        "drop no picture that comes after its request has ended",
        ARRIVALS,
        "            self._drop(arrival.key)\n            return set()\n",
        "            return set()\n",
    ),
    Canary(
        "wake nobody when a picture comes",
        ARRIVALS,
        "woken = self._parked & users",
        "woken: set[str] = set()",
    ),
    Canary(
        "take the output of a picture that could not be encoded as there",
        MEDIA,
        "                self.cache.discard(key)\n",
        "                pass\n",
    ),
    Canary(
        "encode more in a step than its budget",
        MEDIA,
        "tokens_left -= 0 if item.hash in self.cache else item.length",
        "tokens_left -= 0",
    ),
    Canary(
        "evict an output that the same step reads",
        MEDIA,
        "        read.sort(key=lambda each: each[1].hash not in self.cache)",
        "        pass",
    ),
    Canary(
        "let a limit of prompts hold back a picture that must be computed whole",
        SCHEDULER,
        "whole = self._allowed(req, num_left, most, step)",
        "whole = self._allowed(req, num_left, spared, step)",
    ),
    Canary(
        "let snapshots hold back a picture that must be computed whole",
        STATES,
        "is_flexible = True",
        "is_flexible = False",
    ),
    # accounts
    Canary(
        "lose seconds of a wait",
        WAITS,
        "if seconds:\n                history.waits[cause]",
        "if seconds > 1:\n                history.waits[cause]",
    ),
    Canary(
        "remember the dead",
        "sched/predict/ledger.py",
        "entered = self._entered.pop(req)",
        "entered = self._entered[req]",
    ),
    Canary(
        "keep rejected drafts",
        SETTLE,
        "            self._roll_back(plan, plan.drafts.counts, result)\n",
        "            pass\n",
    ),
    # recurrent states
    Canary(
        "advance a state twice over the last block of a hit",
        HASHING,
        "            num_blocks * size,\n            tables,\n",
        "            (num_blocks - 1) * size,\n            tables,\n",
    ),
    Canary(
        "advance a state twice over the tokens of a step",
        WORKER,
        "        for position in range(row.start, first_draft):\n            state = mix",
        "        for position in 2 * [*range(row.start, first_draft)]:\n            state = mix",
    ),
    Canary(
        "read the wrong copy of a state",
        COPIES,
        "return self._values[slot][self._copy[slot]] if",
        "return self._values[slot][self._copy[slot] - 1] if",
    ),
    Canary(
        "keep the state of rejected drafts",
        WORKER,
        "                self.states.advance(step, len(sampled))\n",
        "                self.states.advance(step, len(work.drafts) + 1)\n",
    ),
    Canary(
        "publish a snapshot of rejected drafts",
        STATES,
        "return None if num_later > len(later) else later[:num_later]",
        "return result.token_ids[first : first + num_later].tolist()",
    ),
    Canary(
        "publish a snapshot under the hash of another position",
        HASHING,
        "return allocation.chain[num_tokens // self._block_size - 1]",
        "return allocation.chain[max(0, num_tokens // self._block_size - 2)]",
    ),
    Canary(
        "save a state after other tokens than planned",
        STATES,
        "_column([save.num_tokens for save in saves]),",
        "_column([save.num_tokens - 1 for save in saves]),",
    ),
    Canary(
        "publish a snapshot after its blocks were given away",
        SNAPSHOTS,
        "is_lost = any(map(self._differs, written.blocks, written.keys))",
        "is_lost = False",
    ),
    Canary(
        "start after a prefix hit without its snapshot",
        BUILDER,
        "snapshots=states_to_load(step.new, kv) if step.new else None,",
        "snapshots=None,",
    ),
    Canary(
        "publish a snapshot that could not be saved",
        STATES,
        "if index in lost or later is None or",
        "if later is None or",
    ),
    Canary(
        "publish the snapshot of a request that was sent back",
        STATES,
        "not req.is_finished and req.table.generation.at[req.row] == self.generation",
        "not req.is_finished",
    ),
    Canary(
        "find a prefix without a snapshot at its end",
        HASHING,
        "prefix if snapshots is None else prefix[: snapshots.deepest(hashes, len(prefix))]",
        "prefix",
    ),
    Canary(
        "find windows without a snapshot at their end",
        HASHING,
        "            limit = snapshots.deepest(hashes, limit)\n",
        "            pass\n",
    ),
    # pooled requests
    Canary(
        "let a policy cut a prompt that must be computed whole",
        SCHEDULER,
        "if may_be_cut or allowed <= 0:",
        "if allowed >= 0:",
    ),
    Canary(
        "return the result of a request that restarted meanwhile",
        SETTLE,
        "is_finished or not is_current:\n                continue\n            table.facts",
        "is_finished:\n                continue\n            table.facts",
    ),
    Canary(
        "take a prefix from the cache although every token is wanted",
        "sched/request.py",
        "add.pooling is not None and add.pooling.reads_all",
        "False",
    ),
    Canary(
        "forget that a pooled prompt may be as long as the model",
        "sched/request.py",
        "longest = max_model_len if add.pooling is None else self.num_prompt + 1",
        "longest = max_model_len",
    ),
    Canary(
        "mix up the results of two clients",
        COLUMNS,
        "        results = [self._pooled[picked[row]] for row in rows]\n",
        "        results = [self._pooled[row] for row in sorted(self._pooled)][: len(rows)]\n",
    ),
    # blocks outside the pool
    Canary(
        "store a block with the plan that computes it",
        TIERS,
        "        if plan.num_tokens:\n            self._newest = plan.step\n",
        "        self._ended = self._newest\n        self._order_stores()\n"
        "        if plan.num_tokens:\n            self._newest = plan.step\n",
    ),
    Canary(
        "store what a step computes before it has succeeded",
        TIERS,
        "upto = self._ended if self._ended < self._newest else self._scheduler.view.step.index",
        "upto = self._scheduler.view.step.index",
    ),
    Canary(
        "store a block that was taken or withdrawn meanwhile",
        TIERS,
        "kv.is_content(key) and kv.cache.hash_of(block) == key",
        "kv.is_content(key)",
    ),
    Canary(
        "copy blocks when a step is launched, while earlier ones run",
        WORKER,
        "        self.apply(plan)\n        drafts = draft_rows(plan)\n",
        "        self.apply(plan)\n        self.carry_out(plan)\n        self.begin_loads()\n"
        "        plan.kv_transfer = None\n        drafts = draft_rows(plan)\n",
    ),
    Canary(
        "let others evict the prefix that a load continues",
        PROMOTIONS,
        "held = [[b for b in table if b not in (OUTSIDE, NULL_BLOCK)] for table in tables]",
        "held = [[] for _ in tables]",
    ),
    Canary(
        "give away blocks that a load fills",
        PROMOTIONS,
        "        blocks = self._pool.take(len(wanted.keys))\n",
        "        blocks = self._pool.take(len(wanted.keys))\n        self._pool.release(blocks)\n",
    ),
    Canary(
        "publish what a store did not supply",
        PROMOTIONS,
        "if good[place] and not promotion.is_void and",
        "if not promotion.is_void and",
    ),
    Canary(
        "publish what was loaded before a reset",
        PROMOTIONS,
        "if good[place] and not promotion.is_void and",
        "if good[place] and",
    ),
    Canary(
        "fill a block that one rank lacks",
        GROUP_COPIES,
        "bytes(map(min, zip(",
        "bytes(map(max, zip(",
    ),
    Canary(
        "publish blocks when rank 0 has loaded them",
        GROUP_COPIES,
        "if len(self._others.get(n, ())) == num_others]",
        "if self._others.setdefault(n, []) is not None]",
    ),
    Canary(
        "lose the blocks of a load whose request has ended",
        "kv_transfer/loads.py",
        "                if load.req is req:\n                    load.req = None\n",
        "            of = self._by_number.items()\n"
        "            self._by_number = {n: each for n, each in of if each.req is not req}\n",
    ),
    Canary(
        "wake nobody when a load has ended",
        TIERS,
        "                self._failed[req.arrival] = failure\n"
        "            self._scheduler.wake(req.request_id)\n",
        "                self._failed[req.arrival] = failure\n",
    ),
    Canary(
        "load again and again what no store supplies",
        TIERS,
        "        self._found[req.arrival] = Found({}, inf, num_loads=num_loads + 1)\n",
        "        del self._found[req.arrival]\n",
    ),
    Canary(
        "load more tokens than a request allows",
        TIERS,
        "None if most is None else self._kv.lookup(req).num_tokens + most",
        "None",
    ),
    Canary(
        "keep what was loaded for a request that has started",
        TIERS,
        "    def seated(self, req: Request, step: Step) -> None:\n"
        "        self._let_go(req.arrival)\n",
        "    def seated(self, req: Request, step: Step) -> None:\n        pass\n",
    ),
    Canary(
        "keep what was loaded for a request that has ended",
        TIERS,
        "        self._found.pop(req.arrival, None)\n        self._let_go(req.arrival)\n",
        "        self._found.pop(req.arrival, None)\n",
    ),
    Canary(
        "wake nobody who waits for another's load",
        TIERS,
        "        for other in others:\n            self._scheduler.wake(other.request_id)\n",
        "",
    ),
    Canary(
        "hold nothing for a request whose blocks were loaded",
        PROMOTIONS,
        "        self._tables.hold(loaded)\n",
        "",
    ),
    Canary(
        "remember what stores have for requests that have ended",
        TIERS,
        "        self._found.pop(req.arrival, None)\n",
        "",
    ),
    # ranks
    Canary(
        "trust what the other ranks have computed",
        GROUP,
        "        if found != own:\n",
        "        if not found:\n",
    ),
    Canary(
        "compare results with those of the step before",
        GROUP,
        "        self._own[self._num_results % NUM_RESULTS] = own\n",
        "        self._own[(self._num_results - 1) % NUM_RESULTS] = own\n",
    ),
    Canary(
        "let a rank be late for ever",
        GROUP,
        "self._num_results - number < MOST_LATE",
        "number",
    ),
    Canary(
        "collect the newest step of another rank",
        RANK,
        "self._worker.collect(self._launched.popleft())",
        "self._worker.collect(self._launched.pop())",
    ),
    Canary(
        "compute a plan twice on another rank",
        RANK,
        "        self._launched.append(self._worker.launch(self._plans.decode(message[1:])))\n",
        "        plan = self._plans.decode(message[1:])\n"
        "        self._launched.append(self._worker.launch(plan))\n"
        "        if plan.step % 8 == 5:\n            self._worker.launch(plan)\n",
    ),
    Canary(
        "compute the last plan again on another rank and not the next one",
        RANK,
        "        self._launched.append(self._worker.launch(self._plans.decode(message[1:])))\n",
        "        plan = self._plans.decode(message[1:])\n"
        "        last, self._last = getattr(self, '_last', plan), plan\n"
        "        plan = last if plan.step % 8 == 5 else plan\n"
        "        self._launched.append(self._worker.launch(plan))\n",
    ),
    Canary(
        "read a message of the ring whatever its number",
        "ipc/ring.py",
        "            if number == self._number and size <= self._size:\n",
        "            if size <= self._size:\n",
        "tests/unit/test_ring.py",
    ),
    Canary(
        "draw from other noise on another rank",
        "sample/parts.py",
        "        best = on_slots.sample_part(rows, columns, self.mine.start, *mine)\n",
        "        columns = columns._replace(seeds=columns.seeds + self.ranks.rank)\n"
        "        hold(columns.seeds)\n"
        "        best = on_slots.sample_part(rows, columns, self.mine.start, *mine)\n",
        "tests/unit/test_sampling_parts.py",
    ),
    Canary(
        "let other ranks keep adapters that rank 0 drops",
        "lora/store.py",
        "        self.on_drop(digest)\n",
        "",
        SHARING,
    ),
    Canary(
        "let other ranks keep adapters that one of them could not read",
        "lora/sharing.py",
        "            self._others.notify_others(FORGET, self._number)\n",
        "",
        SHARING,
    ),
    Canary(
        "use adapters of which ranks have read different files",
        "lora/sharing.py",
        "            self._check(own.digest, parts)\n",
        "",
        SHARING,
    ),
    Canary(
        "keep the columns of an older plan",
        "ipc/plan_stream.py",
        "column is getattr(last, name)",
        "len(column) == len(getattr(last, name))",
    ),
    # stages
    Canary(
        "let a stage compute a token before it is known",
        "sched/micro_batches.py",
        "        return True\n",
        "        return False\n",
    ),
    Canary(
        "bring stages no tokens",
        "sched/micro_batches.py",
        "            plan.new_token_ids = tokens\n",
        "",
    ),
    Canary(
        "bring stages an older token",
        "sched/micro_batches.py",
        "[req.tokens[-1] for",
        "[req.tokens[-2] for",
    ),
    Canary(
        "let a stage have all decodes",
        "sched/micro_batches.py",
        "        step.decode_room = least + ",
        "        step.decode_room = num_decodes + ",
    ),
    # prefill apart
    Canary(
        "let requests wait for a prompt whose core has died",
        APART,
        """            self._end_prefill(name, "failed")
        self._calls =""",
        """            self._balancer.end(name)
            del self._prefills[name]
        self._calls =""",
    ),
    Canary(
        "let requests wait for blocks that do not come",
        APART,
        "        late = [name for name, until in self._due.items() if now >= until]\n",
        "        late: list[str] = []\n",
    ),
    Canary(
        "let requests wait for a prompt that was refused",
        APART,
        """                if core.end_add(parts):
                    self._end_prefill(name, "failed")
        calls""",
        """                core.end_add(parts)
        calls""",
    ),
    Canary(
        "send clients what prefills put out",
        APART,
        "        if len(rows) == len(names):\n            return batch\n",
        "        if rows or len(names) == 1:\n            return batch\n",
    ),
)
