"""Text and tokens: tokenizer, chat templates, detokenizer, stop strings. No torch."""
