"""The policy lab: runs scheduling policies on a virtual clock and checks their invariants."""
