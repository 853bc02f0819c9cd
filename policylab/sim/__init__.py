"""The engine core on a virtual clock, with random requests and a worker that only lets time
pass."""
