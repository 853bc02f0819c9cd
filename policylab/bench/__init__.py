"""``metronome bench``: measures engines in this process, and servers by the load they get."""
