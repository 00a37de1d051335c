"""Grammars that an output must match: their three kinds, and llguidance behind one small interface.

llguidance (https://github.com/guidance-ai/llguidance, MIT) walks the trie of a vocabulary against an Earley
parser and regex derivatives: exact for regular expressions and JSON schemas, tens of microseconds a mask.
The gateway checks that a grammar can be compiled, in a process of its own (`check`), before anything is
dispatched; workers compile it for the model's vocabulary.
"""
