"""The page at ``/``: its files, and what it shows of the requests, cores and steps."""
