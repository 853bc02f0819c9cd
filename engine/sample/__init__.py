"""Sampling: edits of logits, choice of tokens, log-probabilities."""
