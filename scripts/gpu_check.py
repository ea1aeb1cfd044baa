"""Prove on a card what a machine without one cannot run. `--help` says more, `--list` what is checked.

It needs torch, triton, transformers, numpy and safetensors, and neither a network nor an installation of Prelay.
"""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent))
    sys.exit(import_module("gpucheck.main").main())
