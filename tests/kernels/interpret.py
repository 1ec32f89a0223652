"""Triton kernels on a machine without a GPU: import this before anything that imports Triton."""

import os

import torch
from hypothesis import settings

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

    import triton.runtime.interpreter as interpreter

    _patched = interpreter._patch_lang_tensor

    def _with_index(tensor, scope):
        """NumPy 2.4 no longer turns `array([3])` into 3, which Triton 3.6's interpreter does for loop bounds."""
        _patched(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = _with_index


def few(n: int) -> settings:
    """At most n examples of what is slow when interpreted; as many as the profile says with HYPOTHESIS_PROFILE=slow."""
    allowed = settings().max_examples
    return settings(max_examples=allowed if allowed > 100 else min(n, allowed))


DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
