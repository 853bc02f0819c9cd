"""What is expected: lengths of outputs, times of steps, service by user."""
