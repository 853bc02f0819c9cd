"""KV blocks, block tables and prefix cache. Only this package changes them. Imports no torch."""
