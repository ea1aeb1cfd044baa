"""Text in, ids out, and back: tokenizer, chat template, assembler, request validation and rendering.

No torch, no Redis, no HTTP: the API imports this package, and so does the thread of a worker that
looks for stop strings.
"""
