"""Downloads models by name from a hub to a local directory."""
