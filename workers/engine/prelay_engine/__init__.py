"""The engine: a model, its KV cache, the sampler and the scheduler behind one `Engine.step()`. No Redis, no HTTP.

Importing the package imports neither torch nor transformers; `prelay_engine.engine` does.
"""
