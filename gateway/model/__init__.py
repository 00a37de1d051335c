"""Text side of a model: card, tokenizer, chat template."""
