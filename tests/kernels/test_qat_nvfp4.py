"""NVFP4 fake quantisation: an exhaustive oracle, kernels bit for bit, round trips, straight-through derivatives."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from interpret import DEVICE
from torch.func import grad, jvp, vmap
from torch.utils.checkpoint import checkpoint

from core.errors import UserError
from kernels.qat import (
    dequantise_nvfp4,
    explain_nvfp4,
    fake_quant_nvfp4,
    nvfp4_global_scale,
    quantise_nvfp4,
)

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
# All finite non-negative E4M3 values in the order of their codes.
E4M3 = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}
BIG = DEVICE.type == "cuda"


def nearest(x, grid):
    """Numbers of the nearest grid values in float64, ties to the even number, saturating: by looking at all of them."""
    distance = (x.clamp(max=1e3)[..., None] - grid).abs()
    ties = distance == distance.min(-1, keepdim=True).values
    odd = torch.arange(len(grid)) % 2
    return torch.where(ties, odd, 2).argmin(-1)


def oracle(x, encode=None):
    """The definition in float64; the two float32 roundings of the scale's argument are kept."""
    groups = x.detach().cpu().float().unflatten(-1, (-1, 16))
    encode = torch.ones(()) if encode is None else encode.cpu()
    decode = (1 / encode).double()
    scale = E4M3[nearest((groups.abs().amax(-1) / 6 * encode).double(), E4M3)]
    unit = (scale * decode).float().double()[..., None]
    quotient = (groups.double().abs() / torch.where(unit > 0, unit, 1)).float().double()
    grid = torch.where(unit > 0, E2M1[nearest(quotient, E2M1)], 0)
    value = (grid * scale[..., None]).float() * decode.float()
    return value.clamp(max=torch.finfo(x.dtype).max).copysign(groups).flatten(-2).to(x.dtype)


def inputs(kind, dtype, shape=(6, 3, 48), seed=0):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=g)
    if kind == "denormal":
        x = x * 1e-40
    elif kind == "tiny":
        x = x * 2.0**-9
    elif kind == "zero":
        x = x * 0
    elif kind == "extreme":
        x = x.sign() * torch.finfo(dtype).max * torch.rand(shape, generator=g).round()
    elif kind == "wide":
        x = x * torch.randint(-20, 15, (*shape[:-1], 1), generator=g).float().exp2()
    elif kind == "ties":
        x = torch.randint(-48, 49, shape, generator=g) * 0.125
    largest = torch.finfo(dtype).max
    return x.clamp(-largest, largest).to(dtype).to(DEVICE)


KINDS = ["normal", "denormal", "tiny", "zero", "extreme", "wide", "ties"]


def same_bits(a, b):
    assert a.dtype == b.dtype
    assert torch.equal(a.cpu().view(BITS[a.dtype]), b.cpu().view(BITS[a.dtype]))


@pytest.mark.parametrize("dtype", BITS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scaled", [False, True])
def test_both_backends_are_the_oracle_bit_for_bit(dtype, kind, scaled):
    shape = (64, 12, 4096) if BIG else (5, 3, 48)
    x = inputs(kind, dtype, shape)
    scale = nvfp4_global_scale(x) if scaled else None
    reference = fake_quant_nvfp4(x, scale, backend="reference")
    small = (slice(0, 5), slice(0, 3), slice(0, 48))
    same_bits(reference[small], oracle(x[small], scale))
    if scaled and dtype == torch.bfloat16 and not BIG:
        return  # the interpreter truncates where bfloat16 should be rounded
    same_bits(fake_quant_nvfp4(x, scale, backend="triton"), reference)


@given(
    shape=st.tuples(st.integers(1, 3), st.integers(1, 4), st.integers(1, 3), st.sampled_from([16, 32, 80, 272])),
    order=st.sampled_from(list(itertools.permutations(range(3)))),
    cut=st.booleans(),
    seed=st.integers(0, 10**6),
)
def test_strides_and_shapes_do_not_matter(shape, order, cut, seed):
    x = inputs("wide", torch.float32, shape, seed).permute(*order, 3)
    x = x[:, ::2] if cut else x
    for f in (fake_quant_nvfp4, quantise_nvfp4):
        ours, theirs = f(x, backend="triton"), f(x.contiguous(), backend="reference")
        pairs = [(ours, theirs)] if f is fake_quant_nvfp4 else zip(ours, theirs)
        assert all(torch.equal(a.float(), b.float()) for a, b in pairs)
        flat = f(x.reshape(-1), backend="triton")
        assert torch.equal((flat if f is fake_quant_nvfp4 else flat[0]).flatten(), next(iter(
            [ours] if f is fake_quant_nvfp4 else ours)).flatten())  # fmt: skip


@pytest.mark.parametrize("backend", ["triton", "reference"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scaled", [False, True])
def test_codes_and_scales_decode_to_the_fake_quantised_values(backend, kind, scaled):
    x = inputs(kind, torch.float32)
    scale = nvfp4_global_scale(x) if scaled else None
    codes, scales = quantise_nvfp4(x, scale, backend=backend)
    assert codes.dtype == torch.uint8 and codes.shape == (6, 3, 24)
    assert scales.dtype == torch.float8_e4m3fn and scales.shape == (6, 3, 3)
    same_bits(dequantise_nvfp4(codes, scales, scale), fake_quant_nvfp4(x, scale, backend="reference"))


def test_the_even_element_is_in_the_low_four_bits():
    x = torch.tensor([[6.0, -0.5, 1.0, -4.0, *[0.0] * 12]], device=DEVICE)
    codes, scales = quantise_nvfp4(x)
    assert scales.float().item() == 1.0
    assert codes[0, :3].tolist() == [7 | 9 << 4, 2 | 14 << 4, 0]


def test_it_is_idempotent_and_exact_in_sixteen_bits():
    """Holds where the largest value of a group is coded as 6: then the scale is found again."""
    x = inputs("wide", torch.float32).clamp(-1e3, 1e3)
    x.unflatten(-1, (-1, 16))[..., 0] = 8.0
    once = fake_quant_nvfp4(x)
    for dtype in (torch.bfloat16, torch.float16):
        assert torch.equal(once.to(dtype).float(), once)
    peaks = once.unflatten(-1, (-1, 16)).abs().amax(-1, keepdim=True).expand(6, 3, 3, 16).flatten(-2)
    assert torch.equal(fake_quant_nvfp4(once), once) or (peaks % 6 != 0).any()


@pytest.mark.parametrize("backend", ["triton", "reference"])
def test_derivatives_pass_straight_through_every_transform(backend):
    x, t = inputs("normal", torch.float32, (4, 2, 32)), inputs("normal", torch.float32, (4, 2, 32), 1)
    f = lambda x: fake_quant_nvfp4(x, backend=backend)  # noqa: E731
    loss = lambda x: (f(x) * t[0]).sum()  # noqa: E731
    assert torch.equal(grad(loss)(x[0]), t[0])
    assert torch.equal(vmap(f)(x), torch.stack([f(row) for row in x]))
    assert torch.equal(vmap(f, in_dims=1, out_dims=1)(x), f(x))
    assert torch.equal(vmap(grad(loss))(x), t[:1].expand_as(x))
    assert torch.equal(jvp(f, (x,), (t,))[1], t) and torch.equal(jvp(f, (x,), (t,))[0], f(x))
    leaf = x.clone().requires_grad_()
    checkpoint(lambda x: (f(x) * t).sum(), leaf, use_reentrant=False).backward()
    assert torch.equal(leaf.grad, t)
    leaf.grad = None
    compiled = torch.compile(lambda x: (f(x) * t).sum(), fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(leaf), (f(x) * t).sum())
    compiled(leaf).backward()
    assert torch.equal(leaf.grad, t)


@pytest.mark.parametrize("backend", ["triton", "reference"])
def test_vmap_gives_every_sample_its_own_global_scale(backend):
    x = inputs("wide", torch.float32, (4, 3, 32))
    f = lambda x: fake_quant_nvfp4(x, nvfp4_global_scale(x), backend=backend)  # noqa: E731
    assert torch.equal(vmap(f)(x), torch.stack([f(row) for row in x]))
    shared = nvfp4_global_scale(x)
    assert torch.equal(vmap(lambda x: fake_quant_nvfp4(x, shared, backend=backend))(x), fake_quant_nvfp4(x, shared))


def test_refusals_name_what_is_wrong():
    x = torch.zeros(2, 24, device=DEVICE)
    with pytest.raises(UserError, match=r"multiple of 16, got \[2, 24\]"):
        fake_quant_nvfp4(x)
    with pytest.raises(UserError, match="unknown backend 'tritn'.*did you mean 'triton'"):
        fake_quant_nvfp4(x[:, :16], backend="tritn")
    with pytest.raises(UserError, match=r"one number per tensor, got shape \[2\]"):
        fake_quant_nvfp4(x[:, :16], torch.ones(2, device=DEVICE))
    wide = torch.zeros(2, 16, dtype=torch.float64, device=DEVICE)
    with pytest.raises(UserError, match="'triton' cannot serve this call: it takes float32.*got torch.float64"):
        fake_quant_nvfp4(wide, backend=" Triton ")
    assert explain_nvfp4(wide)["reference"] == "usable" and "float64" in explain_nvfp4(wide)["triton"]
    assert fake_quant_nvfp4(wide, backend="reference").dtype == torch.float64


@pytest.mark.parametrize("backend", ["triton", "reference"])
@pytest.mark.parametrize("shape", [(0, 16), (3, 0), (16,), (1, 1, 1, 1, 1, 16)])
def test_empty_and_small(backend, shape):
    x = torch.ones(shape, device=DEVICE)
    assert torch.equal(fake_quant_nvfp4(x, backend=backend).float(), oracle(x).to(DEVICE) if x.numel() else x)
