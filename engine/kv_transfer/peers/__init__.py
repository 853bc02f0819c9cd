"""KV blocks of other engines: a server of blocks, and the store that reads them."""
