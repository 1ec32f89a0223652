"""Hugging Face's package `kernels`, which transformers and diffusers import when its distribution is installed.

Where ours comes first on the path, `from kernels import get_kernel` and `import kernels.layer` still have to find
theirs. Their folder follows ours in `__path__`, so that their submodules keep their names (and are loaded once), and
their `__init__.py` runs as the submodule `kernels.__namesake__`, when the first name of theirs is asked for.
"""

import importlib.util
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from types import ModuleType

DISTRIBUTION = "kernels"
MODULE = "kernels.__namesake__"


def their_init() -> Path | None:
    """`kernels/__init__.py` of the other distribution, or None where it is not installed."""
    ours = Path(__file__).with_name("__init__.py")
    for distribution in metadata.distributions(name=DISTRIBUTION):
        file = Path(distribution.locate_file("kernels/__init__.py"))
        if file.is_file() and not file.samefile(ours):
            return file
    return None


def extended_path(ours: Sequence[str]) -> list[str]:
    """The folders in which `kernels.*` is looked for: ours, then theirs."""
    file = their_init()
    return [*ours] if file is None else [*ours, str(file.parent)]


def load() -> ModuleType | None:
    """Their `__init__.py`, run once; None where it is not installed.

    It is a plain module inside of our package, so its relative and absolute imports of `kernels` reach `__path__`.
    """
    if MODULE in sys.modules:
        return sys.modules[MODULE]
    if (file := their_init()) is None:
        return None
    spec = importlib.util.spec_from_file_location(MODULE, file, submodule_search_locations=None)
    module = sys.modules[MODULE] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[MODULE]
        raise
    return module


def forward(name: str):
    """The attribute `name` of their package, for a module's `__getattr__`.

    Raises:
        AttributeError: it has none, is not installed, or the name is a dunder that is not its version.
    """
    module = None if name.startswith("__") and name != "__version__" else load()
    if module is not None and hasattr(module, name):
        return getattr(module, name)
    raise AttributeError(f"module 'kernels' has no attribute {name!r}", name=name, obj=sys.modules.get("kernels"))
