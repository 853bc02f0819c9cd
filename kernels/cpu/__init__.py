"""Bodies for the CPU: Numba where torch alone is slow."""
