"""`python -m tests.mutants [NAME...]`: applies each mutant to a copy of the tree and requires its tests to fail."""

from __future__ import annotations

import importlib
import pkgutil
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import tests.mutants
from tests.mutants import Mutant

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("bindings", "kernels", "reference", "bench", "tests")
# The copy is imported in place of the installed package, through the same folder mapping as setup.py's.
_PACKAGE = """
import sys
from pathlib import Path
root = Path({root!r})
import draft_verify
assert Path(draft_verify.__file__).is_relative_to(root), draft_verify.__file__
"""


def mutants() -> list[Mutant]:
    found = []
    for module in pkgutil.iter_modules(tests.mutants.__path__):
        if module.name != "__main__":
            found += importlib.import_module(f"tests.mutants.{module.name}").MUTANTS
    return found


def survives(mutant: Mutant) -> bool:
    """Whether the suite passes in spite of the mutant."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        (copy / "draft_verify").symlink_to("bindings")
        for name in FOLDERS:
            shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        for name in ("kernels", "reference", "bench"):
            (copy / "bindings" / name).symlink_to(copy / name)
        source = copy / mutant.file
        text = source.read_text()
        if text.count(mutant.old) != 1:
            raise SystemExit(f"{mutant.name}: its old text stands {text.count(mutant.old)} times in {mutant.file}")
        source.write_text(text.replace(mutant.old, mutant.new))
        shutil.copy(ROOT / "pyproject.toml", copy)
        command = [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", *mutant.tests]
        guard = [sys.executable, "-c", _PACKAGE.format(root=folder)]
        subprocess.run(guard, cwd=copy, check=True)
        run = subprocess.run(command, cwd=copy, capture_output=True, text=True)
        if run.returncode not in (0, 1):
            raise SystemExit(f"{mutant.name}: the tests did not run\n{run.stdout[-2000:]}{run.stderr[-2000:]}")
        return run.returncode == 0


def main() -> int:
    names = sys.argv[1:]
    chosen = [mutant for mutant in mutants() if not names or mutant.name in names]
    survivors = []
    for mutant in chosen:
        alive = survives(mutant)
        print(f"{'SURVIVED' if alive else 'killed  '} {mutant.name}", flush=True)
        survivors += [mutant.name] * alive
    print(f"{len(chosen) - len(survivors)} of {len(chosen)} mutants killed")
    return 1 if survivors or not chosen else 0


if __name__ == "__main__":
    sys.exit(main())
