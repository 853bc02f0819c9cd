"""Planning a step and settling its result."""
