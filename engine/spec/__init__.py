"""Speculative decoding: draft tokens are proposed, and the model verifies them in a later step."""
