"""Runs batches: an RQ worker, and the runner of one batch in its work horse. Never torch."""
