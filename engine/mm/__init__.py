"""Images, sound and other media in prompts."""
