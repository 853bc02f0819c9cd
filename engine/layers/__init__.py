"""Layers of decoders. Each owns its weights and calls one or a few kernels."""
