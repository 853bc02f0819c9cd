"""The policy lab: policies on a virtual clock, and proofs of what they keep."""
