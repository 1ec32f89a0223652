"""Triton norms, modulation and gated residuals against the float64 reference, and through every transform."""

import functools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from norm_cases import DEVICE, GPU, as_sum, assert_close, check, launches, randn, with_gradients
from torch.func import grad, jvp, vjp, vmap
from torch.utils.checkpoint import checkpoint

from core.errors import UserError
from kernels import gated_residual, norm_modulate, residual_gate_norm
from kernels.norm import explain_norm, launch, reference

pytest.importorskip("triton")
NORM = functools.partial(norm_modulate, backend="triton")
RESIDUAL = functools.partial(residual_gate_norm, backend="triton")
GATED = functools.partial(gated_residual, backend="triton")
TOKENS, WIDTHS = (300, (24, 100, 1536, 4096, 5120)) if GPU else (5, (24, 100))
DTYPES = st.sampled_from([torch.float32, torch.float16, torch.bfloat16])
MODES = st.sampled_from([None, "sample", "flat", "shared", "token"])


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """Memory for outputs is full of NaN: an element that a kernel leaves out shows."""
    plain = torch.Tensor.new_empty
    monkeypatch.setattr(
        torch.Tensor, "new_empty", lambda x, *a, **k: plain(x, *a, **k).fill_(float("nan")), raising=True
    )


def modulation(seed, mode, b, t, d, dtype=torch.float32):
    """A scale, shift or gate; `"shared"` serves all samples."""
    if mode is None:
        return None
    shape = {"sample": (b, 1, d), "flat": (b, d), "shared": (1, 1, d), "token": (b, t, d)}[mode]
    return randn(seed, *shape, dtype=dtype)


@st.composite
def norm_inputs(draw):
    b, t = draw(st.integers(1, 3)), draw(st.integers(1, TOKENS))
    d, dtype = draw(st.sampled_from(WIDTHS)), draw(DTYPES)
    small = draw(st.sampled_from([torch.float32, dtype]))
    seed = draw(st.integers(0, 999))
    x = randn(seed, t, b, d, dtype=dtype).movedim(0, 1) if draw(st.booleans()) else randn(seed, b, t, d, dtype=dtype)
    inputs = {"x": x}
    for i, name in enumerate(("weight", "bias")):
        inputs[name] = randn(seed + 1 + i, d, dtype=small) if draw(st.booleans()) else None
    for i, name in enumerate(("scale", "shift")):
        inputs[name] = modulation(seed + 3 + i, draw(MODES), b, t, d, small)
    return inputs, draw(st.sampled_from(["layer", "rms"])), dtype


@given(case=norm_inputs())
def test_norm_modulate_and_its_gradients(case):
    inputs, kind, dtype = case
    options = {"kind": kind, "eps": 1e-5}
    kernel, plain = functools.partial(NORM, **options), functools.partial(reference.norm_modulate, **options)
    check(kernel, plain, inputs, dtype)


@given(case=norm_inputs(), gate=MODES, gating=st.sampled_from(["plain", "tanh"]), seed=st.integers(0, 999))
def test_residual_gate_norm_and_its_gradients(case, gate, gating, seed):
    norm, kind, dtype = case
    x = norm.pop("x")
    inputs = {"residual": x, "y": randn(seed, *x.shape, dtype=dtype), "gate": modulation(seed + 1, gate, *x.shape)}
    options = {"kind": kind, "eps": 1e-5, "gating": gating}
    kernel, plain = functools.partial(RESIDUAL, **options), functools.partial(reference.residual_gate_norm, **options)
    check(kernel, plain, {**inputs, **norm}, dtype)


@given(gate=MODES, gating=st.sampled_from(["plain", "tanh"]), dtype=DTYPES, t=st.integers(1, TOKENS))
def test_gated_residual_and_its_gradients(gate, gating, dtype, t):
    shape = (2, t, 24)
    inputs = {"residual": randn(1, *shape, dtype=dtype), "y": randn(2, *shape, dtype=dtype)}
    inputs["gate"] = modulation(3, gate, *shape)
    kernel, plain = (functools.partial(f, gating=gating) for f in (GATED, reference.gated_residual))
    check(kernel, plain, inputs, dtype)


@pytest.mark.parametrize("d, kind", [(5, "layer"), (5, "rms"), (8200, "layer"), (16384, "rms")])
def test_any_width_up_to_the_limit(d, kind):
    inputs = {"x": randn(0, 1, 1 if d > 8192 else 2, d), "weight": randn(1, d), "scale": randn(2, 1, 1, d)}
    kernel, plain = (functools.partial(f, kind=kind, eps=1e-5) for f in (NORM, reference.norm_modulate))
    check(kernel, plain, inputs, torch.float32)
    one = randn(3, 1, 3, 1)  # its gradient is a difference of equal numbers, so only the value is compared
    torch.testing.assert_close(NORM(one, kind="rms", eps=1e-5), norm_modulate(one, kind="rms", eps=1e-5))


def test_a_gradient_of_one_output_alone():
    """What nothing flows back through gets no gradient, and the rest is that of the parts."""
    x, y, gate, w = randn(0, 2, 3, 8), randn(1, 2, 3, 8), randn(2, 2, 1, 8), randn(3, 8)
    for i in range(2):
        one = lambda f: lambda x, y, gate, w: f(x, y, gate, eps=1e-5, weight=w)[i]  # noqa: B023, E731
        inputs = {"x": x, "y": y, "gate": gate, **({"w": w} if i else {})}
        plain, kernel = (functools.partial(one(f), **({} if i else {"w": w}))
                         for f in (reference.residual_gate_norm, RESIDUAL))  # fmt: skip
        check(kernel, plain, inputs, torch.float32)


def test_samples_with_more_tokens_than_programs_and_fewer():
    """The partial sums of many programs, or of one, add up to the same gradients."""
    for b, t in ((1, 67), (40, 1), (7, 3)):
        inputs = {"x": randn(0, b, t, 16), "weight": randn(1, 16), "bias": randn(2, 16), "shift": randn(3, b, 1, 16)}
        check(functools.partial(NORM, eps=1e-5), functools.partial(reference.norm_modulate, eps=1e-5), inputs,
              torch.float32)  # fmt: skip


@pytest.mark.parametrize("kernel", ["norm_forward", "norm_backward"])
def test_every_launch_gives_the_same_numbers(kernel):
    """Rows per step, stages and the number of programs change nothing but the order of sums."""
    x, scale, shift, g = randn(0, 2, 11, 40), randn(1, 2, 1, 40), randn(2, 2, 1, 40), randn(3, 2, 11, 40)
    head = (x, None, None, None, None, scale, shift)
    stats = launch.norm_forward(*head, 1e-5, "rms", "plain")[2]
    run = {
        "norm_forward": lambda how: launch.norm_forward(*head, 1e-5, "rms", "plain", how)[1:],
        "norm_backward": lambda how: launch.norm_backward(*head, stats, g, None, "rms", "plain", how),
    }[kernel]
    want = run(None)
    for how in launches(kernel):
        for a, b in zip(run(how), want, strict=True):
            torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


def test_deterministic():
    inputs = {"x": randn(0, 2, 33, 24), "weight": randn(1, 24), "scale": randn(2, 2, 1, 24)}
    first, second = (with_gradients(functools.partial(NORM, eps=1e-6), inputs) for _ in range(2))
    assert all(torch.equal(first[k], second[k]) for k in first)


@pytest.mark.parametrize("shape", [(0, 3, 8), (2, 0, 8)])
def test_empty_batches_have_zero_gradients(shape):
    inputs = {"x": randn(0, *shape), "weight": randn(1, 8), "shift": randn(2, shape[0], 1, 8)}
    got = with_gradients(functools.partial(NORM, eps=1e-6), inputs)
    assert got["output 0"].shape == shape and not got["weight"].any() and not got["shift"].any()
    new, out = RESIDUAL(inputs["x"], inputs["x"], None, eps=1e-6)
    assert new.shape == out.shape == shape


def test_strides_are_read_in_place():
    """Columns of a modulation table and a token-major batch need no copy; a strided last axis is refused."""
    table, x = randn(0, 2, 1, 6, 16), randn(1, 5, 2, 16).movedim(0, 1)
    scale, shift = table.unbind(2)[1:3]
    want = reference.norm_modulate(x, eps=1e-6, scale=scale, shift=shift)
    torch.testing.assert_close(NORM(x, eps=1e-6, scale=scale, shift=shift), want)
    with pytest.raises(UserError, match=r"last axis of every tensor must have stride 1; call .contiguous\(\)"):
        NORM(x.mT, eps=1e-6)


def parts(x, y, gate, weight, bias, scale, shift):
    """Both outputs, one tensor."""
    new, out = RESIDUAL(x, y, gate, eps=1e-5, weight=weight, bias=bias, scale=scale, shift=shift)
    return torch.stack([new, out])


def plain_parts(*args):
    new, out = reference.residual_gate_norm(
        *args[:3], eps=1e-5, **dict(zip(("weight", "bias", "scale", "shift"), args[3:], strict=True))
    )
    return torch.stack([new, out])


def block_args(*lead, token=False):
    """Arguments of `parts` with leading axes: x, y, gate, weight, bias, scale, shift."""
    b, t, d = 2, 3, 8
    small = (b, t, d) if token else (b, 1, d)
    shapes = ((b, t, d), (b, t, d), small, (d,), (d,), small, small)
    return [randn(i, *lead, *s) for i, s in enumerate(shapes)]


@pytest.mark.parametrize("mapped", ["all", "x only", "weights only"])
def test_vmap_folds_and_gives_per_sample_gradients(mapped):
    chosen = {"all": range(7), "x only": [0], "weights only": [3, 4]}[mapped]
    full, single = block_args(3), block_args()
    args = [full[i] if i in chosen else single[i] for i in range(7)]
    dims = tuple(0 if i in chosen else None for i in range(7))
    torch.testing.assert_close(vmap(parts, dims)(*args), vmap(plain_parts, dims)(*args), atol=1e-5, rtol=1e-5)
    loss = lambda f: lambda *a: as_sum([f(*a)])  # noqa: E731
    got, want = (vmap(grad(loss(f), tuple(range(7))), dims)(*args) for f in (parts, plain_parts))
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)


def test_grad_of_vmap_and_vmap_over_another_axis():
    args = block_args(3)
    loss = lambda f: lambda *a: as_sum([vmap(f)(*a)])  # noqa: E731
    for a, b in zip(grad(loss(parts), 3)(*args), grad(loss(plain_parts), 3)(*args), strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)
    x, w = randn(0, 2, 3, 4, 8), randn(1, 8)
    got, want = (vmap(lambda x: f(x, eps=1e-5, weight=w), 2, 2)(x) for f in (NORM, norm_modulate))  # noqa: B023
    torch.testing.assert_close(got, want)


def test_vmap_over_cotangents_alone():
    """A Jacobian's rows: nothing is mapped but the gradient that flows in."""
    args, cotangents = [a[:1] if a.ndim > 1 else a for a in block_args()], randn(9, 3, 2, 1, 3, 8)
    got, want = (vmap(vjp(f, *args)[1])(cotangents) for f in (parts, plain_parts))
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("token", [False, True])
def test_jvp(token):
    """The tangent of both outputs to every input, and to some of them."""
    args, tangents = block_args(token=token), [t.flip(0) for t in block_args(token=token)]
    got, want = (jvp(f, tuple(args), tuple(tangents)) for f in (parts, plain_parts))
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
    for i in range(7):
        one = lambda f: lambda a: f(*args[:i], a, *args[i + 1 :])  # noqa: B023, E731
        got, want = (jvp(one(f), (args[i],), (tangents[i],))[1] for f in (parts, plain_parts))
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


def test_jvp_of_the_single_calls():
    x, y, g, s = randn(0, 2, 3, 8), randn(1, 2, 3, 8), randn(2, 2, 1, 8), randn(3, 2, 1, 8)
    for gating in ("plain", "tanh"):
        got, want = (jvp(lambda *a: f(*a, gating=gating), (x, y, g), (y, x, s)) for f in (GATED, gated_residual))  # noqa: B023
        torch.testing.assert_close(got, want)
    got, want = (jvp(lambda x, s: f(x, eps=1e-5, kind="rms", scale=s), (x, s), (y, g)) for f in (NORM, norm_modulate))  # noqa: B023
    torch.testing.assert_close(got, want)


def test_a_second_derivative_is_refused_not_zero():
    x = randn(0, 1, 2, 8)
    with pytest.raises(NotImplementedError, match="norm_backward has no derivative"):
        grad(lambda x: grad(lambda x: NORM(x, eps=1e-5).square().sum())(x).sum())(x)


def test_checkpoint_recomputes_it():
    args = dict(zip("xygwbsz", block_args()))
    again = lambda **a: checkpoint(parts, *a.values(), use_reentrant=False)  # noqa: E731
    got, want = with_gradients(again, args), with_gradients(lambda **a: parts(*a.values()), args)
    assert all(torch.equal(got[k], want[k]) for k in want)


def test_one_graph_and_the_same_numbers():
    """Compiled with one graph, forward and backward; gates without a norm too."""
    compiled = torch.compile(parts, fullgraph=True, backend="inductor" if GPU else "aot_eager")
    for token in (False, True):
        args = dict(zip("xygwbsz", block_args(token=token)))
        got, want = (with_gradients(lambda **a: f(*a.values()), args) for f in (compiled, parts))  # noqa: B023
        assert_close(got, want, 1e-6)
    gate = torch.compile(GATED, fullgraph=True, backend="aot_eager")
    inputs = {"residual": randn(0, 2, 3, 8), "y": randn(1, 2, 3, 8), "gate": randn(2, 2, 8)}
    assert_close(with_gradients(gate, inputs), with_gradients(GATED, inputs), 1e-6)


def test_the_choice_of_a_backend_and_its_reasons():
    x = randn(0, 1, 2, 8)
    assert list(explain_norm(x).values()) == ["usable", "usable"]
    assert next(iter(explain_norm(x))) == ("triton" if GPU else "reference")
    assert "float64" in explain_norm(x.double())["triton"]
    with pytest.raises(UserError, match="takes float32, float16 and bfloat16, got torch.float64"):
        NORM(x.double(), eps=1e-6)
    with pytest.raises(UserError, match="inner width must be 1 to 16384, got 16385"):
        NORM(randn(0, 1, 1, 16385), eps=1e-6)
    with pytest.raises(UserError, match=r"x must be \[B, T, D\]"):
        NORM(randn(0, 2, 8), eps=1e-6)
    with pytest.raises(UserError, match="unknown backend 'tritn'.*auto"):
        norm_modulate(x, eps=1e-6, backend="tritn")
    with pytest.raises(UserError, match=r"residual and y must be alike"):
        GATED(x, x.bfloat16(), randn(1, 1, 8))
    meta = torch.empty(1, 2, 8, device="meta")
    assert explain_norm(meta)["triton"] == "it needs a CUDA device, the tensors are on meta"


def test_all_faults_of_a_call_in_one_message():
    x = randn(0, 2, 3, 8)
    with pytest.raises(UserError) as error:
        norm_modulate(x, eps=1e-6, kind="batch", weight=randn(1, 7), scale=randn(2, 3, 1, 8))
    for text in ("weight must be [8], got [7]", "scale must be [B, D]", "kind must be one of layer, rms, got 'batch'"):
        assert text in str(error.value)
    with pytest.raises(UserError, match="gating must be one of plain, tanh, got 'sigmoid'"):
        gated_residual(x, x, x, gating="sigmoid")


@pytest.mark.skipif(not GPU, reason="needs a GPU")
def test_no_call_waits_for_the_device():
    args = dict(zip("xygwbsz", block_args()))
    with_gradients(lambda **a: parts(*a.values()), args)  # compiles
    leaves = [x.requires_grad_() for x in args.values()]
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.autograd.grad(parts(*leaves).sum(), leaves)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_half_precision_sums_in_float32():
    """A weight's gradient over many tokens: a bfloat16 sum would stall at 256.

    One unit in the last place is allowed, since the interpreter cuts off where a GPU rounds.
    """
    x = torch.ones(1, 600, 2, dtype=torch.bfloat16, device=DEVICE) * torch.tensor([1.0, -1.0], device=DEVICE)
    x = x.bfloat16()
    w = torch.ones(2, dtype=torch.bfloat16, device=DEVICE, requires_grad=True)
    NORM(x, eps=1e-6, kind="rms", weight=w).sum().backward()
    torch.testing.assert_close(w.grad.float(), torch.tensor([600.0, -600.0], device=DEVICE), rtol=8e-3, atol=0)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_compiler_sees_the_launches():
    """Forward and backward graphs hold Triton launches in place of the ops, which would cost the host more."""
    from functorch.compile import aot_function, nop

    graphs = []

    def note(graph, inputs):
        graphs.append([str(node.target) for node in graph.graph.nodes])
        return nop(graph, inputs)

    x, weight = torch.randn(2, 8, 64, device="cuda"), torch.randn(64, device="cuda")
    x.requires_grad_(), weight.requires_grad_()
    backend = lambda graph, inputs: aot_function(graph, fw_compiler=note, bw_compiler=note)  # noqa: E731
    fn = torch.compile(lambda x, w: norm_modulate(x, eps=1e-6, weight=w, kind="rms"), fullgraph=True, backend=backend)
    fn(x, weight).sum().backward()
    assert len(graphs) == 2
    for targets in graphs:
        assert any("triton_kernel_wrapper" in t for t in targets)
        assert not any("latentree" in t for t in targets)
