"""Random inputs and comparisons that the tests of the norm kernels share."""

import interpret
import torch

from kernels.norm import config

DEVICE = interpret.DEVICE
GPU = DEVICE.type == "cuda"
# Relative error in the Euclidean norm. The arithmetic is float32 and every result is rounded once: half a unit in the
# last place of the dtype at most, which for bfloat16 is 2^-9 per element; the residual sum adds one rounding.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 6e-3}


def launches(kernel):
    """The launches of a sweep; without a GPU one of each number of rows, since the interpreter sees no difference."""
    choices = config.ALTERNATIVES[kernel]
    return choices if GPU else {how.rows: how for how in choices}.values()


def randn(seed, *shape, dtype=torch.float32):
    """Standard normal numbers on the test's device."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def as_sum(outputs):
    """A scalar with another weight for every element of the outputs."""
    parts = [o.to(torch.promote_types(o.dtype, torch.float32)) for o in outputs]
    return sum((o * weighing(o.shape, i).to(o)).sum() for i, o in enumerate(parts))


def weighing(shape, i):
    """Eighths from -2 to 8, without a period in any axis: exact in every dtype, and their sums do not cancel."""
    n = torch.arange(torch.Size(shape).numel())
    return ((n * n * 3 + n * 5 + i) % 11 - 2).view(shape) / 8


def with_gradients(f, inputs):
    """Outputs of `f(**inputs)` and gradients of `as_sum` of them, by name; None inputs stay None."""
    leaves = {k: None if x is None else x.detach().requires_grad_() for k, x in inputs.items()}
    out = f(**leaves)
    outputs = out if isinstance(out, tuple) else (out,)
    given = {k: x for k, x in leaves.items() if x is not None}
    grads = torch.autograd.grad(as_sum(outputs), list(given.values()))
    return {f"output {i}": o.detach() for i, o in enumerate(outputs)} | dict(zip(given, grads))


def assert_close(got, want, tolerance):
    """`|got - want| <= tolerance |want|` for every named tensor, NaN never passes."""
    assert got.keys() == want.keys()
    for name, w in want.items():
        g = got[name]
        assert g.shape == w.shape, name
        error = torch.linalg.vector_norm(g.double() - w.double())
        assert error <= tolerance * torch.linalg.vector_norm(w.double()) + 1e-30, (name, float(error))


def upcast(inputs):
    """Float64 copies."""
    return {k: None if x is None else x.double() for k, x in inputs.items()}


def check(kernel, reference, inputs, dtype):
    """Outputs and gradients of the kernel against the reference in float64."""
    got = with_gradients(kernel, inputs)
    assert got["output 0"].dtype == dtype
    assert_close(got, with_gradients(reference, upcast(inputs)), TOLERANCE[dtype])
