"""The policy lab: scheduling policies on a virtual clock, and checks of what they must keep."""
