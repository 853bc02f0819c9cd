"""Speculative decoding: tokens that are guessed first and verified afterwards."""
