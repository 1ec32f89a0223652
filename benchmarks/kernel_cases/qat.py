"""QAT attention, NVFP4 and FP8 fake quantisation.

Rates of QAT attention count algorithmic FLOPs: 4 base forward, 10 base backward, base = B H Lq Lk D. The kernels
execute 6 (K Q, quantised and exact P V) and 14 (scores and dP in both backward kernels, dQ, dK, dV): the case's name
gives those, so rate * 6/4 or 14/10 is what the matrix units did. The peer is exact attention, which quantises nothing;
where the package `fastvideo_kernel` is installed, in cases of its own FastVideo's kernel at its defaults.
"""

import dataclasses
import functools
import importlib.util

import torch
import torch.nn.functional as F

from benchmarks.kernel_cases import Case, backward_of
from kernels import attention
from kernels.linear import fake_quant
from kernels.qat import fake_quant_nvfp4, qat_attention
from kernels.qat.tiles import ALTERNATIVES, Plan, plan

SHAPES = ((1, 12, 32760, 32760, 128), (1, 3, 31200, 31200, 128), (1, 12, 32760, 512, 128), (1, 12, 8192, 8192, 64))
SWEPT = SHAPES[0]


def _tensors(shape, device):
    b, h, lq, lk, d = shape
    make = lambda length: torch.randn(b, length, h, d, dtype=torch.bfloat16, device=device)  # noqa: E731
    return make(lq), make(lk), make(lk)


def _forward(shape, device, **options):
    q, k, v = (t.requires_grad_() for t in _tensors(shape, device))
    return lambda: qat_attention(q, k, v, **options)


def _inference(shape, device):
    q, k, v = _tensors(shape, device)

    def run():
        with torch.no_grad():
            return qat_attention(q, k, v)

    return run


def _backward(shape, device, **options):
    return backward_of(functools.partial(qat_attention, **options), *_tensors(shape, device))


def _exact(shape, device):
    q, k, v = _tensors(shape, device)
    return lambda: attention(q, k, v, site="self", backend="sdpa")


def _exact_backward(shape, device):
    return backward_of(functools.partial(attention, site="self", backend="sdpa"), *_tensors(shape, device))


def _fastvideo(q, k, v):
    """FastVideo's QAT attention, of contiguous `[B, H, L, D]`."""
    from fastvideo_kernel.triton_kernels.attn_qat_train import attention as published

    return published(q, k, v, False, q.shape[-1] ** -0.5)


def _published_cases(device) -> list[Case]:
    """Ours beside the published kernel; none where it is not installed."""
    if importlib.util.find_spec("fastvideo_kernel") is None:
        return []
    b, h, lq, lk, d = SWEPT
    base, name = float(b * h * lq * lk * d), f"({b},{h},{lq}x{lk},{d})"
    inputs = lambda: [x.transpose(1, 2).contiguous() for x in _tensors(SWEPT, device)]  # noqa: E731

    def forward():
        q, k, v = (x.requires_grad_() for x in inputs())
        return lambda: _fastvideo(q, k, v)

    published = {"fwd": forward, "bwd": lambda: backward_of(_fastvideo, *inputs())}
    ours = {"fwd": functools.partial(_forward, SWEPT, device), "bwd": functools.partial(_backward, SWEPT, device)}
    return [
        Case(f"qat attention {n}, published", name, {"ours": ours[n]}, {"FastVideo": published[n]}, flops=f * base)
        for n, f in (("fwd", 4), ("bwd", 10))
    ]


def _saved(shape, device, tiles: Plan):
    from kernels.qat.launch import run_forward

    q, k, v = _tensors(shape, device)
    scale = shape[-1] ** -0.5
    return q, k, v, scale, *run_forward(q, k, v, None, None, None, scale, False, "group", True, tiles)


def _swept_forward(shape, device, tiles: Plan):
    from kernels.qat.launch import run_forward

    q, k, v = _tensors(shape, device)
    return lambda: run_forward(q, k, v, None, None, None, shape[-1] ** -0.5, False, "group", True, tiles)


def _swept_backward(shape, device, tiles: Plan):
    from kernels.qat.launch import run_backward

    q, k, v, scale, out, high, lse = _saved(shape, device, tiles)
    grad = torch.randn_like(out)
    return lambda: run_backward(
        grad, q, k, v, None, None, None, high, lse, scale, False, "group", "consistent", tiles
    )  # fmt: skip


def _variants(kernel: str, make, device) -> dict:
    default = plan(SWEPT[-1], torch.cuda.get_device_capability(device) if device.type == "cuda" else None)
    return {
        f"ours, {kernel} {t.queries}x{t.keys} w{t.warps} s{t.stages}": functools.partial(
            make, SWEPT, device, dataclasses.replace(default, **{kernel: t})
        )
        for t in ALTERNATIVES[kernel]
    }


def _attention_cases(device) -> list[Case]:
    cases = []
    for shape in SHAPES:
        b, h, lq, lk, d = shape
        base, name = float(b * h * lq * lk * d), f"({b},{h},{lq}x{lk},{d})"
        ours = {"ours": functools.partial(_forward, shape, device)}
        back = {"ours": functools.partial(_backward, shape, device)}
        sweep, sweep_back = {}, {}
        if shape == SWEPT:
            ours |= {
                "ours, no gradients (executes 4 base)": functools.partial(_inference, shape, device),
                "ours, two-level P": functools.partial(_forward, shape, device, p_scale="row"),
                "ours, global scales and smooth K": functools.partial(
                    _forward, shape, device, global_scales=True, smooth_k=True
                ),
            }
            back["ours, published dV"] = functools.partial(_backward, shape, device, dv="published")
            sweep = _variants("forward", _swept_forward, device)
            sweep_back = {k: v for n in ("dq", "dkv") for k, v in _variants(n, _swept_backward, device).items()}
        exact = {"exact attention": functools.partial(_exact, shape, device)}
        exact_back = {"exact attention": functools.partial(_exact_backward, shape, device)}
        cases += [
            Case("qat attention fwd (4 base, executes 6)", name, ours, exact, flops=4 * base, variants=sweep),
            Case("qat attention bwd (10 base, executes 14)", name, back, exact_back, flops=10 * base,
                 variants=sweep_back),
        ]
    return cases


def _compiled(f, x):
    compiled = torch.compile(f)
    return lambda: compiled(x)


def _plain_fp8(x):
    blocks = F.pad(x.float(), (0, -x.shape[-1] % 128)).unflatten(-1, (-1, 128))
    scale = blocks.abs().amax(-1, keepdim=True) / 448
    return ((blocks / scale).to(torch.float8_e4m3fn).float() * scale).flatten(-2)[..., : x.shape[-1]].to(x.dtype)


def _plain_nvfp4(x):
    groups = x.float().unflatten(-1, (-1, 16))
    scale = (groups.abs().amax(-1, keepdim=True) / 6).clamp(max=448).to(torch.float8_e4m3fn).float()
    y = (groups / torch.where(scale > 0, scale, 1.0)).clamp(-6, 6)
    step = torch.where(y.abs() < 2, 0.5, torch.where(y.abs() < 4, 1.0, 2.0))
    return ((y / step).round() * step * scale).flatten(-2).to(x.dtype)


def _quant_cases(device) -> list[Case]:
    def make(f):
        x = torch.randn(32760, 5120, dtype=torch.bfloat16, device=device)
        return lambda: f(x)

    def peer(f):
        return _compiled(f, torch.randn(32760, 5120, dtype=torch.bfloat16, device=device))

    moved = float(2 * 2 * 32760 * 5120)
    entries = {
        "nvfp4": (fake_quant_nvfp4, _plain_nvfp4),
        "fp8 1x128": (lambda x: fake_quant(x, "fp8_block", "activation"), _plain_fp8),
        "fp8 128x128": (lambda x: fake_quant(x, "fp8_block", "weight"), None),
    }
    return [
        Case(
            f"fake quant {name}",
            "(32760,5120) bf16",
            {"ours": functools.partial(make, ours)},
            {} if plain is None else {"compiled": functools.partial(peer, plain)},
            bytes=moved,
        )
        for name, (ours, plain) in entries.items()
    ]


def cases(device: torch.device) -> list[Case]:
    """The issue's shape with its sweep, one sequence-parallel rank of the published recipe, cross attention, D 64."""
    return _attention_cases(device) + _published_cases(device) + _quant_cases(device)
