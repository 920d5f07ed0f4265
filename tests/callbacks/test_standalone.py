"""Each callback file alone in an empty folder trains a module that knows nothing of this project."""

import subprocess
import sys
from pathlib import Path

import pytest

CALLBACKS = Path(__file__).parents[2] / "callbacks"


@pytest.mark.parametrize(
    "package", ["lightning.pytorch", pytest.param("pytorch_lightning", marks=pytest.mark.slow)]
)
def test_each_callback_file_copied_alone_trains_an_unrelated_module(tmp_path, package):
    (tmp_path / "empty").mkdir()
    done = subprocess.run(
        [
            sys.executable, str(Path(__file__).with_name("standalone_fit.py")), str(CALLBACKS), str(tmp_path / "empty"),
            package,
        ],
        cwd=tmp_path, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    files = [p for p in CALLBACKS.glob("*.py") if p.stem != "__init__"]
    assert done.stdout.count("trained alone") == len(files) == 7
