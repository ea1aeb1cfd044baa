"""A process forked from one that has asked for a GPU cannot use any: what the nursery imports must not ask."""

from __future__ import annotations

import os
import subprocess
import sys

#: Imports as the nursery does, where torch seems to be a build with CUDA and every question to a driver is fatal.
IMPORTS = """
import importlib, sys, traceback
import torch

def asked(*_, **__):
    traceback.print_stack()
    raise SystemExit("a driver was asked")

torch.version.cuda = "13.0"
for name in ("is_available", "device_count", "current_device", "init", "_lazy_init", "get_device_capability",
             "get_device_properties", "is_bf16_supported", "mem_get_info"):
    setattr(torch.cuda, name, asked)
for name in ("is_available", "device_count"):
    setattr(torch.accelerator, name, asked)
for name in ("_cuda_getDeviceCount", "_cuda_getCurrentRawStream", "_cuda_init"):
    setattr(torch._C, name, asked)
for module in sys.argv[1:]:
    importlib.import_module(module)
print(torch.cuda.is_initialized())
"""


def test_nothing_that_the_nursery_imports_asks_for_a_gpu() -> None:
    from prelay.nursery import _MODULES

    kinds = ("llama", "qwen3", "gemma3", "gpt_oss", "mixtral", "phi3", "glm4_moe")
    modules = [*_MODULES, *(f"transformers.models.{kind}.modeling_{kind}" for kind in kinds)]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    command = [sys.executable, "-c", IMPORTS, *modules]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert (done.returncode, done.stdout) == (0, "False\n"), done.stderr
