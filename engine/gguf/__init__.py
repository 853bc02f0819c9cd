"""GGUF files: one file with weights, configuration and tokenizer, as llama.cpp stores them."""
