"""The models that a gateway serves: how they are read, named, asked, changed in service and shared."""
