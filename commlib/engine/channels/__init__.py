"""Communication channels of a model, one for each kind of communicated data."""
