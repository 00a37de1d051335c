"""The public face of the service: text in, text out, and the choice of the workers between.

Text half: tokenizer, chat_template, detokenizer, stop_strings, model_card, limits, validation.
Serving half: admission, router, session, links, fleet, service. Only this program sees text; the workers
know token ids. It imports neither torch nor transformers.
"""
