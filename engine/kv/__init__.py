"""Who owns which KV block. Torch-free; the only writer of block tables and reference counts."""
