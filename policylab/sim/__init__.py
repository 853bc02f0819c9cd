"""The core on a virtual clock: requests that are drawn, a worker that only takes its time."""
