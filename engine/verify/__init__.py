"""Deprecated: moved to ``policylab.verify``."""
