"""A core in another process: who serves it, and the clients that speak to it."""
