"""LoRA adapters: which adapters are loaded in which slot of the device."""
