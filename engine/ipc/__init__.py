"""Communication between processes: encoding of messages, sockets, and child processes."""
