"""Loads a model directory into a model that computes logits over a paged KV cache."""
