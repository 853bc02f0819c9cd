"""Plans a step, and settles it: processes its result."""
