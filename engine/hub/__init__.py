"""Models by name: from a repository of a hub to a directory of this machine."""
