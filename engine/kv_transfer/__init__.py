"""KV that comes from elsewhere, or goes there: requests that wait for it."""
