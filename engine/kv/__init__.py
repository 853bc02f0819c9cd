"""KV blocks and block tables, which requests own. Nothing outside writes them. Imports no torch."""
