"""Pictures in prompts: from bytes to placeholder tokens and to the arrays that an encoder reads."""
