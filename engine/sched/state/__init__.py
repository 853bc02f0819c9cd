"""What the scheduler knows of its requests: numbers in columns, who waits and who runs, and why."""
