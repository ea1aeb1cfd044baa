"""The parts of scripts/gpu_check.py.

A parent (`main`) imports no torch: it hands checks out to child processes one by one, so that one which breaks the card
for its process, crashes or hangs costs itself alone. `catalogue` names all checks; `*_checks.py` are what they do.
"""
