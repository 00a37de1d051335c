"""Recurrent layers in torch: the interface of a layer, one file a kind, and the states of a step."""
