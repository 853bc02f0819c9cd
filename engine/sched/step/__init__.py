"""How a step comes about and what its result means."""
