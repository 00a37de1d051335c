"""Encoders of images: tiles of pixels in, rows of embeddings for the text model out."""
