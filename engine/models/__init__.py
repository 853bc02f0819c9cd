"""From a model directory to something that computes logits over a paged KV cache."""
