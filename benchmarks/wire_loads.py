"""What is asked of a core in a process, the same of every engine."""

NUM_TRIPS = 1000
NUM_WARM_UP = 100
NUM_REQUESTS = 64
NUM_PROMPT = 32
NUM_OUTPUT = 128


def prompts() -> list[dict[str, list[int]]]:
    """Of the requests that run at once."""
    return [
        {"prompt_token_ids": [10 + (index + i) % 200 for i in range(NUM_PROMPT)]}
        for index in range(NUM_REQUESTS)
    ]
