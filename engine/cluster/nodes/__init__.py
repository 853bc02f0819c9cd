"""The nodes of a Ray cluster: room on them, what they must have, and processes that run there."""
