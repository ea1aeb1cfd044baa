"""Puts compiled kernels into a wheel, which is for one platform then, where PRELAY_WHEEL_KERNELS=1 (`make wheel`)."""

from __future__ import annotations

import os
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class Kernels(BuildHookInterface[Any]):
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "editable" or os.environ.get("PRELAY_WHEEL_KERNELS") != "1":
            return
        sys.path.insert(0, str(Path(self.root) / "workers" / "engine"))
        from prelay_engine.native.build import ship

        self._folder = tempfile.TemporaryDirectory()
        for path in ship(Path(self._folder.name)):
            build_data["force_include"][str(path)] = f"prelay_engine/native/shipped/{path.name}"
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:  # noqa: ARG002
        if (folder := getattr(self, "_folder", None)) is not None:
            folder.cleanup()
