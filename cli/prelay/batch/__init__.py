"""`prelay batch`: files of requests, run by a server on what its fleet has to spare."""
