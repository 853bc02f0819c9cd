"""One CUDA device: requests lie in its slots, and the host says only what changes."""
