"""Cost of the service beside its engine: of the gateway alone and of the whole system."""
