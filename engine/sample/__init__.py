"""From logits to tokens: edits a request asks for, the choice, log-probabilities."""
