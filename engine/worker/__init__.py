"""The worker of one device: it holds weights and KV cache, and computes step plans."""
