"""What a grammar cannot hold is enforced on the JSON written so far."""
