"""The import rules: layers point one way, callbacks stand alone, nothing imports recipes; README's commands are CI's."""

import ast
import sys
from pathlib import Path

import pytest

import lit_gpt_loop

ROOT = Path(__file__).parents[1]
PURE = {
    "schedules",
    "flops",
    "budget",
    "sample_order",
    "config",
    "devices",
    "lr_scaling",
    "memory",
    "activations",
    "branch",
    "next_steps",
    "plan_check",
    "plan_values",
    "ranks",
    "resume",
    "run_lock",
    "run_origin",
    "run_plan",
    "run_spec",
    "signatures",
}
LIGHTNING = {
    "data",
    "module",
    "strategies",
    "journal",
    "cli",
    "metrics",
    "progress",
    "dist_checkpoint",
    "lr_range",
    "stream_training",
    "noise_scale",
    "run_files",
}
T_ALLOWED = {
    "torch",
    "numpy",
    "datasets",
    "tokenizers",
    "safetensors",
    "tqdm",
    "rich",
    "fsspec",
    "huggingface_hub",
    "pyarrow",
    "yaml",
    "matplotlib",
}  # the last four lazily, where the extra that brings them is asked for
CALLBACK_ALLOWED = {"torch", "lightning", "torchmetrics", "numpy", "fsspec", "rich"}


def imports(file, top_level_only=False):
    """Yield (line, module) of every import in a file; TYPE_CHECKING blocks do not count."""
    tree = ast.parse(file.read_text())
    skipped = {
        id(n) for node in ast.walk(tree) if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for n in ast.walk(node)
    }  # fmt: skip
    for node in tree.body if top_level_only else ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{file.name}:{node.lineno} imports relatively"
            files_named = [a.name for a in node.names if (ROOT / node.module / f"{a.name}.py").is_file()]
            for name in [f"{node.module}.{n}" for n in files_named] or [node.module]:
                yield node.lineno, name


def files(folder):
    return sorted(p for p in (ROOT / folder).glob("*.py") if p.name != "__init__.py")


@pytest.mark.parametrize("file", files("callbacks"), ids=lambda p: p.stem)
def test_a_callback_stands_alone(file):
    for line, name in imports(file):
        top = name.partition(".")[0]
        assert top in CALLBACK_ALLOWED or top in sys.stdlib_module_names, f"{file.name}:{line} imports {name}"


@pytest.mark.parametrize("file", files("callbacks"), ids=lambda p: p.stem)
def test_a_pytorch_lightning_project_flips_one_line(file):
    lines = [i for i in file.read_text().splitlines() if i.strip() == "import lightning.pytorch as pl"]
    assert len(lines) == 1
    assert [name for _, name in imports(file) if "lightning" in name] == ["lightning.pytorch"]


@pytest.mark.parametrize("file", files("callbacks"), ids=lambda p: p.stem)
def test_a_callback_file_holds_one_public_callback_class(file):
    tree = ast.parse(file.read_text())
    public = [
        n.name for n in tree.body
        if isinstance(n, ast.ClassDef) and not n.name.startswith("_")
        and any("Callback" in ast.unparse(b) or ast.unparse(b) == "Checkpoint" for b in n.bases)
    ]  # fmt: skip
    assert len(public) == 1, public


@pytest.mark.parametrize("file", files("lit_gpt_loop"), ids=lambda p: p.stem)
def test_layers_point_one_way(file):
    layer = "P" if file.stem in PURE else "L" if file.stem in LIGHTNING else "T"
    for line, name in imports(file):
        where = f"{file.name}:{line} ({layer}) imports {name}"
        top, _, rest = name.partition(".")
        assert top not in ("recipes", "callbacks"), where
        if top in sys.stdlib_module_names:
            continue
        if top == "lit_gpt_loop":
            if layer == "P":
                assert rest in PURE, where
            elif layer == "T":
                assert rest not in LIGHTNING, where
        elif layer == "P":
            pytest.fail(where)
        elif layer == "T":
            assert top in T_ALLOWED, where


def test_only_recipes_import_recipes():
    for folder in ("lit_gpt_loop", "callbacks"):
        for file in files(folder):
            assert not any(name.partition(".")[0] == "recipes" for _, name in imports(file)), file


def test_every_layer_name_is_a_file():
    stems = {p.stem for p in files("lit_gpt_loop")}
    assert not (PURE | LIGHTNING) - stems


@pytest.mark.parametrize("version", ["2.6.2", "2.6.3"])
def test_compromised_releases_are_refused_by_name(monkeypatch, version):
    monkeypatch.setattr(
        lit_gpt_loop.metadata, "version", lambda package: version if package == "lightning" else "2.6.6"
    )
    with pytest.raises(RuntimeError, match=f"lightning {version} is installed, a compromised release"):
        lit_gpt_loop.refuse_compromised_releases()


def test_setup_cfg_excludes_the_compromised_releases():
    text = (ROOT / "setup.cfg").read_text()
    assert "lightning>=2.6.4,!=2.6.2,!=2.6.3" in text
    assert "pytorch-lightning!=2.6.2,!=2.6.3" in text
    pinned = dict(i.split("==") for i in (ROOT / "constraints.txt").read_text().splitlines() if "==" in i)
    assert pinned["torch"] == "2.13.0"
    assert pinned["lightning"] == pinned["pytorch-lightning"] == "2.6.6"


def test_readme_holds_the_two_commands_that_ci_runs():
    readme = (ROOT / "README.md").read_text().splitlines()
    commands = [i for i in readme if i.startswith("python3 -m venv .venv && ")]
    assert commands == [
        'python3 -m venv .venv && .venv/bin/pip install -c constraints.txt -e ".[quickstart]" '
        "&& .venv/bin/python -m recipes.pretrain fit --config configs/quickstart.yaml",
        'python3 -m venv .venv && .venv/bin/pip install -c constraints.txt -e ".[test]" && .venv/bin/python -m pytest',
    ]
    ci = (ROOT / ".ci/run").read_text()
    assert "README.md" in ci
    assert 'bash -c "$tests"' in ci
    assert 'bash -c "$quickstart' in ci
