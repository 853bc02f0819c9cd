"""A simulator: the engine core on a virtual clock, with random requests and a worker that computes
nothing but the time of each step."""
