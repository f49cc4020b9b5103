"""What is installed is what is in the tree: every module, every shipped recipe and template, and nothing else."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("compress", "quant", "prune", "distill", "evals")
KINDS = (".py", ".yaml", ".j2", ".css", ".js")


def test_wheel_holds_every_file_of_the_tree(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    for folder in (*PACKAGES, "recipes"):
        shutil.copytree(ROOT / folder, tree / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, tree / file)
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path), str(tree)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    [wheel] = tmp_path.glob("*.whl")
    held = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    wanted = {
        path.relative_to(ROOT).as_posix() for folder in PACKAGES for path in (ROOT / folder).rglob("*")
        if path.suffix in KINDS
    }  # fmt: skip
    wanted |= {f"compress/recipes/{path.name}" for path in (ROOT / "recipes").iterdir() if path.suffix in KINDS}
    assert held == wanted
