"""The text side of a model: card, tokenizer, chat template."""
