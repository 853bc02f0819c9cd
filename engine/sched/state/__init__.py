"""State of the scheduler: counts in columns, waiting and running requests, causes of waits."""
