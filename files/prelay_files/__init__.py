"""Files on disk that outlive any process: what was uploaded, and what becomes of a batch. No Redis, no HTTP."""
