"""One device: weights, KV memory, and the computing of plans."""
