"""The assembly: scheduler and executor, step by step."""
