"""Speculative decoding: draft tokens are proposed, and verified by the model afterwards."""
