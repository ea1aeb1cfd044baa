"""`prelay bench`: the engine alone, the pipeline without a model, and a running server under load."""
