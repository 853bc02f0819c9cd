"""Sections of benchmarks/device.py: generators of rows, which are kept if one is cut off."""
