"""Who computes how many tokens in each step. Torch-free, clock-free, dice-free."""
