"""What is not the mechanism's own: how policies and resources are found, asked and checked."""
