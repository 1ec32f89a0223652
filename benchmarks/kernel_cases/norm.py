"""Norms with modulation, residual + gate + norm, QK norm with rotary embedding, each forward and backward.

Bytes count every input read once and every output written once. The calls take 30 to 150 us, so each closure, ours
and the peer's, is captured in a CUDA graph: what is timed is the device, not Python.
"""

import functools
import math
from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.kernel_cases import Case
from kernels.norm import dispatch, launch, reference, rope_launch
from kernels.norm.config import ALTERNATIVES, Launch

SHAPES = ((2, 4290, 4096), (1, 32760, 1536))
ROPE_SHAPES = ((2, 4290, 32, 128), (1, 32760, 12, 128))
SWEPT = 4096
COPY = "copy of as many bytes"
BF16 = torch.bfloat16


def graphed(make: Callable[[], Callable[[], object]]) -> Callable[[], object]:
    """The closure that `make()` returns, as the replay of one CUDA graph; autograd's nodes live on its stream."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        run = make()
        for _ in range(3):
            run()
        stream.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    replay = lambda: graph.replay()  # noqa: E731
    replay.keep = run  # the tensors that the graph reads
    return replay


def _timed(call, inputs: dict[str, Tensor], backward: bool):
    """`call(**inputs)`, or only its backward pass for random gradients of all outputs."""
    if not backward:
        return lambda: call(**inputs)
    leaves = {k: x.detach().requires_grad_() for k, x in inputs.items()}
    out = call(**leaves)
    outputs = out if isinstance(out, tuple) else (out,)
    grads = [torch.randn_like(o) for o in outputs]
    return lambda: torch.autograd.grad(outputs, list(leaves.values()), grads, retain_graph=True)


def _random(device: torch.device, **shapes) -> dict[str, Tensor]:
    """Normal numbers by name: bfloat16 for activations, float32 for what is smaller."""
    large = max(math.prod(s) for s in shapes.values())
    return {
        name: torch.randn(s, device=device, dtype=BF16 if math.prod(s) == large else torch.float32)
        for name, s in shapes.items()
    }


def _make(call, device: torch.device, shapes: dict, backward: bool, compiled: bool):
    call = torch.compile(call, fullgraph=True, dynamic=False) if compiled else call
    return graphed(lambda: _timed(call, _random(device, **shapes), backward))


def _case(op: str, call, plain, device, shapes: dict, backward: bool, tensors: int, small: int = 0, swept=None) -> Case:
    """One case: `tensors` of the activations' size and `small` further bytes move."""
    large = max(math.prod(s) for s in shapes.values())
    label = "x".join(map(str, max(shapes.values(), key=math.prod)))
    make = functools.partial(functools.partial, _make, device=device, shapes=shapes, backward=backward)
    ours, peers = {"triton": make(call, compiled=False)}, {"torch.compile": make(plain, compiled=True)}
    name, moved = f"{op} {'bwd' if backward else 'fwd'}", 2 * tensors * large + small
    return Case(name, label, ours, peers, bytes=moved, variants={COPY: _copy(device, moved), **(swept or {})})


def _copy(device: torch.device, moved: int):
    """What the driver's copy needs for as many bytes: the ceiling of calls as short as these."""

    def make():
        x = torch.empty(moved // 2, dtype=torch.uint8, device=device)
        y = torch.empty_like(x)
        return lambda: y.copy_(x)

    return lambda: graphed(make)


def _norm_launch(device, shape, backward: bool, how: Launch):
    """The bare launch of RMSNorm + modulation, for a sweep."""

    def make():
        b, t, d = shape
        made = _random(device, x=shape, grad=shape, scale=(b, 1, d), shift=(b, 1, d))
        head = (made["x"], None, None, None, None, made["scale"], made["shift"])
        if not backward:
            return lambda: launch.norm_forward(*head, 1e-6, "rms", "plain", how)
        stats = launch.norm_forward(*head, 1e-6, "rms", "plain")[2]
        return lambda: launch.norm_backward(*head, stats, made["grad"], None, "rms", "plain", how)

    return lambda: graphed(make)


def _rope_launch(device, shape, backward: bool, how: Launch):
    """The bare launch of joint QK norm + split RoPE, for a sweep."""

    def make():
        b, t, h, d = shape
        made = _random(device, q=shape, k=shape, dq=shape, dk=shape, qw=(1, h * d), kw=(1, h * d))
        head = (made["q"], made["k"], made["qw"], made["kw"], *(x[None, :, None] for x in _tables(device, t, d)))
        if not backward:
            return lambda: rope_launch.rope_forward(*head, 1e-6, "inner", "half", how)
        rstds = rope_launch.rope_forward(*head, 1e-6, "inner", "half")[2:]
        return lambda: rope_launch.rope_backward(*head, *rstds, made["dq"], made["dk"], "inner", "half", how)

    return lambda: graphed(make)


def _tables(device, *shape: int) -> tuple[Tensor, Tensor]:
    *lead, d = shape
    angles = torch.rand(*lead, d // 2, device=device) * 100
    return angles.cos(), angles.sin()


def _sweep(kernel: str, one, device, shape, backward: bool) -> dict:
    return {str(how): one(device, shape, backward, how) for how in ALTERNATIVES[kernel]}


def _norms(device, shape, backward: bool) -> list[Case]:
    b, t, d = shape
    modulated = {"x": shape, "scale": (b, 1, d), "shift": (b, 1, d)}
    affine = {"residual": shape, "y": shape, "gate": (b, 1, d), "weight": (d,), "bias": (d,)}
    swept = _sweep("norm_backward" if backward else "norm_forward", _norm_launch, device, shape, backward)
    norm = {"eps": 1e-6, "kind": "rms"}
    return [
        _case(
            "RMSNorm + modulate", functools.partial(dispatch.norm_modulate, backend="triton", **norm),
            functools.partial(reference.norm_modulate, **norm), device, modulated, backward, 3 if backward else 2,
            swept=swept if d == SWEPT else None,
        ),
        _case(
            "LayerNorm + modulate per token", functools.partial(dispatch.norm_modulate, backend="triton", eps=1e-6),
            functools.partial(reference.norm_modulate, eps=1e-6), device,
            modulated | {"scale": shape, "shift": shape}, backward, 6 if backward else 4,
        ),
        _case(
            "residual + gate + LayerNorm", functools.partial(dispatch.residual_gate_norm, backend="triton", eps=1e-6),
            functools.partial(reference.residual_gate_norm, eps=1e-6), device, affine, backward, 6 if backward else 4,
        ),
        _case(
            "residual + gate", functools.partial(dispatch.gated_residual, backend="triton"), reference.gated_residual,
            device, {n: affine[n] for n in ("residual", "y", "gate")}, backward, 3,
        ),
    ]  # fmt: skip


def _ropes(device, shape, backward: bool) -> list[Case]:
    b, t, h, d = shape
    swept = _sweep("rope_backward" if backward else "rope_forward", _rope_launch, device, shape, backward)
    found = []
    for name, over, pairs, lead in (
        ("joint QK norm + split RoPE", "inner", "half", (t,)),
        ("joint QK norm + split RoPE per head", "inner", "half", (1, t, h)),
        ("joint QK norm + interleaved RoPE", "inner", "interleaved", (t,)),
        ("QK norm per head + interleaved RoPE", "head", "interleaved", (t,)),
    ):
        angles, width = _tables(device, *lead, d), h * d if over == "inner" else d
        options = {"eps": 1e-6, "rope": angles, "over": over, "pairs": pairs}
        shapes = {"q": shape, "k": shape, "q_weight": (width,), "k_weight": (width,)}
        found.append(
            _case(
                name, functools.partial(dispatch.qk_norm_rope, backend="triton", **options),
                functools.partial(reference.qk_norm_rope, **options), device, shapes, backward, 6 if backward else 4,
                small=2 * angles[0].nbytes, swept=swept if h * d == SWEPT and (over, pairs) == ("inner", "half")
                and lead == (t,) else None,
            )
        )  # fmt: skip
    return found


def cases(device: torch.device) -> list[Case]:
    """Every op at the shapes of LTX-2 (two samples, 4290 tokens, width 4096) and of Wan 1.3B; sweeps at the first."""
    found = []
    for backward in (False, True):
        for shape in SHAPES:
            found += _norms(device, shape, backward)
        for shape in ROPE_SHAPES:
            found += _ropes(device, shape, backward)
    return found
