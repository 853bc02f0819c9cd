"""Jumps over steps that only repeat, so that a simulation does not plan each of them.

A simulation spends most of its steps on decodes among which nothing happens: every running request
gets one token, and none comes, starts or ends. Plans, block ids, times and counts of a jump are
those of stepping, to the last bit.

stretch      the page: steps that repeat
core         the core that jumps, and what it needs of an executor
scheduling   finds stretches for a scheduler and settles them
stable       for how many steps a policy's answers stay the same
blocks       KV blocks and prefix cache for many steps at once
"""
