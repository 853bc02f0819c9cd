"""Recurrent states: which snapshots of them are taken and loaded."""
