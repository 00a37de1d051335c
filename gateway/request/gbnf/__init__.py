"""EBNF grammars in the notation of llama.cpp (GBNF), translated to what workers compile."""
