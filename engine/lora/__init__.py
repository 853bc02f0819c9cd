"""LoRA adapters: which may run at once."""
