"""Output that must follow a grammar."""
