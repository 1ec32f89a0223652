"""The pattern behind every kernel: a toy op must compose with everything that kernels must compose with."""

import pytest
import torch
from torch import Tensor
from torch.func import grad, jvp, vmap
from torch.utils.checkpoint import checkpoint

from kernels.op import differentiable, fold_batch, raw_op, unfold_batch


def _cube(x: Tensor, scale: float) -> Tensor:
    return scale * x**3


def _slope(x: Tensor, g: Tensor, scale: float) -> Tensor:
    return 3 * scale * x**2 * g


_RAW = raw_op("test_cube", _cube, lambda x, scale: torch.empty_like(x))
_RAW_SLOPE = raw_op("test_cube_slope", _slope, lambda x, g, scale: torch.empty_like(x))


def _folded(f):
    def fold(size, dims, args):
        *tensors, scale = args
        out = f(*(fold_batch(x, d, size) for x, d in zip(tensors, dims[:-1], strict=True)), scale)
        return unfold_batch(out, size), 0

    return fold


slope = differentiable(_RAW_SLOPE, fold=lambda *a: _folded(slope)(*a))


def rules(f):
    return {
        "fold": lambda *a: _folded(f())(*a),
        "keep": lambda args, outputs: (args[0],),
        "backward": lambda kept, args, grads: (slope(kept[0], grads[0], args[1]), None),
    }


cube = differentiable(
    _RAW, **rules(lambda: cube), tangent=lambda kept, args, tangents: slope(kept[0], tangents[0], args[1])
)
plain = differentiable(raw_op("test_plain", _cube, lambda x, scale: torch.empty_like(x)), **rules(lambda: plain))
X = torch.linspace(-1, 2, 24, dtype=torch.float64).reshape(4, 3, 2)
SLOPE = 6 * X**2


def total(f):
    return lambda x: f(x, 2.0).sum()


def test_grad_and_vmap_in_any_order():
    assert torch.equal(cube(X, 2.0), 2 * X**3)
    assert torch.equal(grad(total(cube))(X), SLOPE)
    assert torch.equal(vmap(lambda x: cube(x, 2.0), in_dims=1, out_dims=1)(X), 2 * X**3)
    assert torch.equal(vmap(grad(total(cube)))(X), SLOPE)
    assert torch.equal(grad(lambda x: vmap(lambda y: cube(y, 2.0))(x).sum())(X), SLOPE)
    assert torch.equal(vmap(vmap(grad(total(cube))))(X[..., None]), SLOPE[..., None])


def test_forward_mode_where_there_is_a_tangent():
    assert torch.equal(jvp(lambda x: cube(x, 2.0), (X,), (X,))[1], SLOPE * X)
    with pytest.raises(NotImplementedError, match="test_plain has no derivative"):
        jvp(lambda x: plain(x, 2.0), (X,), (X,))


def test_a_second_derivative_is_refused_not_zero():
    with pytest.raises(NotImplementedError, match="test_cube_slope has no derivative"):
        grad(lambda x: grad(total(cube))(x).sum())(X)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_one_graph_and_the_same_numbers(backend):
    x = X.clone().requires_grad_()
    compiled = torch.compile(lambda x: cube(x + 0.0, 2.0).sum(), fullgraph=True, backend=backend)
    compiled(x).backward()
    assert torch.equal(x.grad, SLOPE)


@pytest.mark.skipif(torch.__version__ < (2, 13), reason="earlier compilers cannot map a registered op, and say so")
def test_a_map_inside_the_compiler():
    assert torch.equal(torch.compile(vmap(lambda x: cube(x, 2.0)), fullgraph=True, backend="aot_eager")(X), 2 * X**3)


def test_a_transform_that_the_compiler_cannot_trace_is_an_error_not_a_zero():
    with pytest.raises(Exception, match="setup_context"):
        torch.compile(grad(total(cube)), fullgraph=True, backend="aot_eager")(X)


def test_a_tangent_inside_the_compiler_is_an_error_not_a_zero():
    with pytest.raises(Exception, match="no forward-mode derivative inside a compiled function"):
        torch.compile(lambda x: jvp(lambda y: cube(y, 2.0), (x,), (x,)), fullgraph=True, backend="aot_eager")(X)


def test_checkpoint_recomputes_it():
    x = X.clone().requires_grad_()
    checkpoint(total(cube), x, use_reentrant=False).backward()
    assert torch.equal(x.grad, SLOPE)
