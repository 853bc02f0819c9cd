"""Images, sound and the like in prompts."""
