"""`kernels` is also a package of Hugging Face: with ours first on the path and theirs installed, both must work."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run(code, *paths, cwd):
    """Runs code in a fresh interpreter that sees our root first, then `paths`."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (ROOT, *paths))), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=env, cwd=cwd, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.fixture
def namesake(tmp_path):
    """A small distribution of that name: relative and absolute imports, a submodule, a name that ours has too."""
    package, info = tmp_path / "site/kernels", tmp_path / "site/kernels-0.99.0.dist-info"
    (package / "layer").mkdir(parents=True)
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: kernels\nVersion: 0.99.0\n")
    (package / "layer/__init__.py").write_text("from .mode import Mode\n")
    (package / "layer/mode.py").write_text("import enum\nclass Mode(enum.Flag):\n    INFERENCE = enum.auto()\n")
    (package / "load.py").write_text("def get_kernel(name):\n    return 'kernel ' + name\n")
    (package / "__init__.py").write_text(
        "from importlib import metadata\n__version__ = metadata.version('kernels')\nprint('loaded')\n"
        "from .layer import Mode\nfrom kernels.load import get_kernel\nattention = 'theirs'\n"
    )
    return tmp_path / "site"


def test_their_names_and_submodules_are_found_after_ours(namesake, tmp_path):
    out = run(
        "import kernels, core; print('ours')\n"
        "from kernels import attention, norm_modulate, get_kernel, Mode\n"
        "import kernels.layer.mode, kernels.norm\n"
        "assert callable(attention), 'a name that both have is ours'\n"
        "assert get_kernel('x') == 'kernel x' and kernels.__version__ == '0.99.0'\n"
        "assert Mode is kernels.layer.mode.Mode, 'one copy of their modules'\n"
        "assert not hasattr(kernels, 'nothing') and not hasattr(kernels, '__wrapped__')\n",
        namesake, cwd=tmp_path,
    )  # fmt: skip
    assert out.split() == ["ours", "loaded"], "loaded once, and only when asked for"


def test_without_theirs_an_unknown_name_is_an_import_error(tmp_path):
    run(
        "import kernels\n"
        "try:\n    from kernels import surely_no_such_name\n"
        "except ImportError as e:\n    assert 'surely_no_such_name' in str(e)\n"
        "else:\n    raise SystemExit('no error')\n",
        cwd=tmp_path,
    )  # fmt: skip


def test_a_failing_import_of_theirs_says_why_each_time(namesake, tmp_path):
    (namesake / "kernels/__init__.py").write_text("import no_such_dependency\n")
    run(
        "import kernels\n"
        "for _ in range(2):\n    try:\n        kernels.get_kernel\n"
        "    except ModuleNotFoundError as e:\n        assert e.name == 'no_such_dependency'\n"
        "    else:\n        raise SystemExit('no error')\n",
        namesake, cwd=tmp_path,
    )  # fmt: skip


MODELS = """
import torch, kernels
import transformers, diffusers
from transformers.integrations import hub_kernels
from transformers.utils import is_kernels_available
assert is_kernels_available(), "transformers sees the distribution"
config = transformers.UMT5Config(vocab_size=32, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2)
out = transformers.UMT5EncoderModel(config)(torch.arange(4)[None]).last_hidden_state
assert out.shape == (1, 4, 16) and out.isfinite().all()
model = diffusers.WanTransformer3DModel(
    num_attention_heads=2, attention_head_dim=12, in_channels=4, out_channels=4, text_dim=16, freq_dim=16,
    ffn_dim=32, num_layers=1)
video = model(torch.randn(1, 4, 1, 4, 4), torch.tensor([3]), torch.randn(1, 5, 16), return_dict=False)[0]
assert video.shape == (1, 4, 1, 4, 4) and video.isfinite().all()
from kernels import get_kernel, norm_modulate
from kernels.layer.mode import Mode
assert Mode is kernels.Mode and kernels.__file__.startswith(ROOT)
"""


def pip_install(requirement, target):
    """None, or why it failed."""
    command = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--retries", "0",
               "--timeout", "10", "--target", str(target), requirement]  # fmt: skip
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    except subprocess.TimeoutExpired:
        return "installing it took more than two minutes"
    return done.stderr.strip()[-200:] if done.returncode else None


@pytest.fixture(scope="session")
def installed(tmp_path_factory):
    """The published package in a folder of its own; skipped where no package index can be reached.

    transformers imports it only if its version is in a range. Where the index has none of that range, the newest one
    is installed and this copy's metadata give the range's first version.
    """
    from transformers.dependency_versions_table import deps

    site, wanted = tmp_path_factory.mktemp("kernels-site"), deps.get("kernels", "kernels")
    if pip_install(wanted, site) is None:
        return site
    if (reason := pip_install("kernels", site)) is not None:
        pytest.skip(f"the package `kernels` cannot be installed here: {reason}")
    metadata = next(site.glob("kernels-*.dist-info/METADATA"))
    first = re.search(r">=\s*([\d.]+)", wanted)[1]
    metadata.write_text(re.sub(r"(?m)^Version: .*$", f"Version: {first}", metadata.read_text(), count=1))
    return site


@pytest.mark.skipif(not all(importlib.util.find_spec(n) for n in ("transformers", "diffusers")), reason="dev only")
def test_transformers_and_diffusers_run_beside_the_published_package(installed, tmp_path):
    run(f"ROOT = {str(ROOT)!r}\n{MODELS}", installed, cwd=tmp_path)
