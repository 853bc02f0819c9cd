"""KV transfer: requests that wait for KV from elsewhere, and blocks that are sent."""
