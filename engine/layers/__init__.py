"""Layers of decoders: each owns its weights and calls one kernel or a few."""
