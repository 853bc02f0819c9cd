"""Checks of policies and schedulers with a fake worker: deterministic, without torch."""
