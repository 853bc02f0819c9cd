"""Sections of benchmarks/device.py: each yields rows, so that what it had is kept if cut off."""
