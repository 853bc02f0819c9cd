"""KV blocks and their owners. Torch-free; the only writer of block tables and reference counts."""
