"""The former place of ``policylab.verify``."""
