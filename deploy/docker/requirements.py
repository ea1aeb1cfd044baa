"""Print what pyproject.toml wants installed, a line each: the base, or the extra that is named. For the Dockerfile."""

import sys
import tomllib
from pathlib import Path

project = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))["project"]
print(*(project["optional-dependencies"][sys.argv[1]] if sys.argv[1:] else project["dependencies"]), sep="\n")
