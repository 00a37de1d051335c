"""Model definitions: the shape of a model, its rotary embedding and the reference decoder in torch."""
