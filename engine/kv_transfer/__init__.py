"""KV transfer: requests that wait for KV computed elsewhere, and blocks that are sent elsewhere."""
