"""Estimates: output lengths, step times, and the service of each user."""
