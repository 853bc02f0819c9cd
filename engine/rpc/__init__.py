"""A core in another process: its server, and its clients."""
