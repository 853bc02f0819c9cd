"""One adapter per engine. Each runs in that engine's own Python and prints one JSON line."""
