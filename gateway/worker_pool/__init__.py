"""The workers as this gateway knows them: links, load, and the choice among them."""
