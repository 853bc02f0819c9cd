"""The engine core on a virtual clock: drawn requests, and a worker that only takes time."""
