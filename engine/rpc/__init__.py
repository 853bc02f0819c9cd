"""A core in another process: its server, and the clients that connect to it."""
