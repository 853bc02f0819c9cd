"""How bytes travel: messages to bytes and back, sockets, directories for them, child processes."""
