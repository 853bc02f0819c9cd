"""Estimates output lengths and step times, and accounts the service of each user."""
