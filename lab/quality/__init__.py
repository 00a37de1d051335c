"""`python -m lab.quality`: what each precision costs in quality, on real text through the real engine.

The measure is the distance to fp32 logits of the very same weights: perplexity, Kullback-Leibler divergence,
and how often the likeliest next token is the same.
"""
