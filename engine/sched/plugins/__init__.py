"""Finds policies, resources and schedulers (also plug-ins), calls them and checks results."""
