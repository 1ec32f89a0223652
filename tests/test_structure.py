"""Imports go one way, and importing changes nothing."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ORDER = ["core", "kernels", "nn", "parallel", "infer", "train"]
FILES = [f for package in ORDER for f in sorted((ROOT / package).rglob("*.py"))]


def imported(tree: ast.AST) -> set[str]:
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative import"
            names.add(node.module)
    return names


def backward_arrows(package: str, tree: ast.AST) -> set[str]:
    later = set(ORDER[ORDER.index(package) + 1 :]) | {"tests"}
    return {name for name in imported(tree) if name.split(".")[0] in later}


@pytest.mark.parametrize("file", FILES, ids=lambda f: str(f.relative_to(ROOT)))
def test_imports_go_one_way(file):
    tree = ast.parse(file.read_text())
    assert backward_arrows(file.relative_to(ROOT).parts[0], tree) == set()
    assert "torch.utils._pytree" not in imported(tree), "use optree: the two order dict keys differently"


def test_the_walk_sees_a_backward_arrow():
    assert backward_arrows("core", ast.parse("def f():\n    from nn.wan import block")) == {"nn.wan"}
    assert backward_arrows("infer", ast.parse("import core.trees, nn")) == set()


def test_importing_everything_touches_no_device_and_no_global_state():
    """In a fresh process: no CUDA context, no change of torch's defaults or the environment, no heavy packages."""
    modules = [".".join(f.relative_to(ROOT).with_suffix("").parts) for f in FILES]
    modules = [m.removesuffix(".__init__") for m in modules if not m.endswith("__main__")]
    code = (
        "import torch, os, importlib\n"
        "before = (torch.get_default_dtype(), torch.get_num_threads(), dict(os.environ))\n"
        f"for m in {modules!r}: importlib.import_module(m)\n"
        "assert before == (torch.get_default_dtype(), torch.get_num_threads(), dict(os.environ))\n"
        "assert not torch.cuda.is_initialized()\n"
        "import sys; assert 'transformers' not in sys.modules and 'diffusers' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=120)


def test_the_installed_package_is_found_from_another_directory(tmp_path):
    """The install puts the top-level names on the path; nothing depends on the working directory."""
    code = "import core, kernels, nn, parallel, infer, train; print(core.__path__[0])"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()) == ROOT / "core"
