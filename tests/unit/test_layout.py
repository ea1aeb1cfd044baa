"""The shape of the repository: source roots, what may import what, and that the lists of it agree."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def source_roots() -> list[str]:
    roots: list[str] = project()["tool"]["hatch"]["build"]["dev-mode-dirs"]
    return roots


def packages() -> list[Path]:
    return [ROOT / path for path in project()["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]]


def python(code: str, *arguments: str) -> str:
    """Run `code` in a fresh interpreter at the root, with the root first on its path."""
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], cwd=ROOT, capture_output=True, text=True, check=False, timeout=100
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_import_queue_at_the_root_is_the_standard_library_s() -> None:
    found = python("import sys, queue; print(sys.path[0] in ('', sys.argv[1])); print(queue.__file__)", str(ROOT))
    at_root, file = found.splitlines()
    assert at_root == "True"
    assert not Path(file).is_relative_to(ROOT)
    assert Path(file).name == "queue.py"


def test_no_folder_of_tests_is_a_package_named_as_the_standard_library_s() -> None:
    assert list(ROOT.glob("tests/**/queue/__init__.py")) == []
    assert not (ROOT / "queue" / "__init__.py").exists()


@pytest.mark.parametrize("root", source_roots())
def test_a_source_root_holds_one_package_and_no_module(root: str) -> None:
    folder = ROOT / root
    assert list(folder.glob("*.py")) == []
    inside = [path.name for path in folder.iterdir() if path.is_dir() and path.name != "__pycache__"]
    # `workers` is the parent of several roots, and each of those holds one package
    assert [name for name in inside if (folder / name / "__init__.py").exists()] == inside
    assert len(inside) == 1
    assert inside[0].startswith("prelay")


@pytest.mark.parametrize("package", packages(), ids=lambda path: path.name)
def test_every_package_says_that_it_is_typed(package: Path) -> None:
    assert (package / "__init__.py").exists()
    assert (package / "py.typed").exists()


def test_the_lists_of_packages_agree() -> None:
    names = sorted(path.name for path in packages())
    tools = project()["tool"]
    # mypy reads the tests too: a call with an old signature is found before it is made
    checked = {root.partition("/")[0] for root in source_roots()} | {"tests", "benchmarks", "scripts"}
    assert set(tools["mypy"]["files"]) == checked
    assert sorted(tools["importlinter"]["root_packages"]) == names
    assert sorted(tools["mypy"]["mypy_path"].split(":")) == sorted(source_roots())
    assert sorted(str(path.parent.relative_to(ROOT)) for path in packages()) == sorted(source_roots())
    on_disk = [path.parent for path in ROOT.glob("*/prelay*/__init__.py")]
    on_disk += [path.parent for path in ROOT.glob("workers/*/prelay*/__init__.py")]
    assert sorted(path.name for path in on_disk) == names


IMPORT_ALL = """
import importlib, pkgutil, sys
package = importlib.import_module(sys.argv[1])
names = [sys.argv[1]] + [found.name for found in pkgutil.walk_packages(package.__path__, package.__name__ + ".")]
for name in names:
    if not name.endswith(".__main__"):
        importlib.import_module(name)
print(len(names))
print(*sorted({name.partition(".")[0] for name in sys.modules} & {"torch", "transformers", "safetensors"}))
"""


@pytest.mark.parametrize("package", ["prelay_queue", "prelay_text", "prelay_files", "prelay_api", "prelay_batch"])
def test_the_api_side_and_batches_run_without_torch(package: str) -> None:
    modules, heavy = python(IMPORT_ALL, package).splitlines()
    assert int(modules) > 0
    assert heavy == ""


def test_the_check_above_would_see_torch() -> None:
    _, heavy = python(IMPORT_ALL, "prelay_kv").splitlines()
    assert "torch" in heavy.split()


LIGHT = ["prelay_kv.ref", "prelay_kv.sweep", "prelay_kv.segment", "prelay_kv.layout", "prelay_kv.errors"]


def test_describing_and_sweeping_kv_needs_no_torch() -> None:
    code = "import importlib, sys; [importlib.import_module(n) for n in sys.argv[1:]]; print('torch' in sys.modules)"
    assert python(code, *LIGHT) == "False\n"


def test_the_layers_hold() -> None:
    linter = Path(sys.executable).with_name("lint-imports")
    assert linter.exists(), "import-linter is a development dependency"
    done = subprocess.run([linter, "--no-cache"], cwd=ROOT, capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 0, done.stdout


def _bare(requirement: str) -> str:
    return re.split(r"[<>=~!;\[ ]", requirement, maxsplit=1)[0]


def test_every_dependency_has_its_reason_and_no_other_package_has_one() -> None:
    groups = project()["dependency-groups"].values()
    extras = project()["project"]["optional-dependencies"].values()
    wanted = [*project()["project"]["dependencies"], *(each for group in [*groups, *extras] for each in group)]
    page = (ROOT / "docs" / "dependencies.md").read_text()
    explained = re.findall(r"^\| ([a-z0-9-]+) \| [^|]+ \| [^|]+ \|$", page, flags=re.MULTILINE)
    assert sorted(set(explained) - {"package"}) == sorted(_bare(requirement) for requirement in wanted)


def pulled_in(requirements: list[str], found: set[str]) -> set[str]:
    """The packages that these pull in, by what is installed here. Extras and markers are followed generously."""
    for requirement in requirements:
        name = _bare(requirement).lower().replace("_", "-")
        if name in found or "extra ==" in requirement:
            continue
        found.add(name)
        try:
            pulled_in(metadata.requires(name) or [], found)
        except metadata.PackageNotFoundError:  # for another system
            continue
    return found


def test_what_api_processes_and_batch_workers_install_does_not_pull_in_torch() -> None:
    api = pulled_in(project()["project"]["dependencies"], set())
    assert {"fastapi", "starlette", "anyio", "redis", "tokenizers"} <= api
    assert not {"torch", "transformers", "accelerate"} & api
    workers = pulled_in(project()["project"]["optional-dependencies"]["workers"], set())
    assert {"torch", "transformers"} <= workers
