"""Make the environment of the programs: `python -m benchmarks.programs.environment DIRECTORY`.

It is apart from Ganger's own, which lacks most of what the programs import.
"""

from __future__ import annotations

import subprocess
import sys
import venv
from pathlib import Path

HERE = Path(__file__).parent
CONSTRAINTS = HERE.parent.parent / "constraints.txt"
STAMP = ".ready"


def make(directory: Path) -> None:
    """Make it, or leave it if the packages that it was made of are still the wanted ones."""
    requirements = HERE / "requirements.txt"
    wanted = requirements.read_text() + CONSTRAINTS.read_text()
    stamp = directory / STAMP
    if stamp.is_file() and stamp.read_text() == wanted:
        return
    print(f"== setting up {directory} (transformers, Lightning, JAX, ...: minutes)", flush=True)
    venv.create(directory, with_pip=True)
    python = directory / "bin" / "python"
    files = ("--constraint", str(CONSTRAINTS), "--requirement", str(requirements))
    subprocess.run([str(python), "-m", "pip", "install", "--quiet", *files], check=True)
    make_torchvision_importable(python)
    stamp.write_text(wanted)


def make_torchvision_importable(python: Path) -> None:
    """Do without torchvision's compiled operators where PyTorch is a build without CUDA.

    The wheel's operators need CUDA's libraries there, and torchvision then fails when it registers their shapes.
    """
    test = [str(python), "-c", "import torchvision"]
    if subprocess.run(test, capture_output=True, check=False).returncode == 0:
        return
    found = "import importlib.util as u; print(u.find_spec('torchvision').submodule_search_locations[0])"
    place = subprocess.run([python, "-c", found], capture_output=True, text=True, check=True).stdout.strip()
    (Path(place) / "_meta_registrations.py").write_text('"""Left empty: the operators cannot be loaded."""\n')
    subprocess.run(test, check=True)


if __name__ == "__main__":
    make(Path(sys.argv[1]))
