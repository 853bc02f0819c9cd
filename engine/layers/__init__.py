"""What decoders are made of: each layer owns its weights and calls one kernel or a few."""
