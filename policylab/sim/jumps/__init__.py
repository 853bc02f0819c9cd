"""Jumps over repeating steps, so that a simulation does not plan each of them.

In most steps of a simulation every running request gets one token, and no request arrives, starts
or ends. Plans, block ids, times and counts of a jump are bit-identical to those of single steps.

stretch      a sequence of repeating steps
core         the engine core that jumps, and the interface of its executor
scheduling   finds such a sequence and applies its results to a scheduler
stable       the number of steps for which a policy's answers stay the same
blocks       KV blocks and prefix cache for many steps at once
"""
