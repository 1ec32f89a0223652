"""What only a GPU can show: every attention backend, compiled BF16 training, bitwise resume, equal draws."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from core import keys, specs
from core.scan import compiled, recompute, scan
from kernels import attention, attention_reference
from kernels.attention import BACKENDS
from nn import wan
from nn.run import Run
from nn.wan_inputs import model_inputs
from train import sft
from train.metrics import read_rows, train_rows

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
ROOT = Path(__file__).parents[2]
# Without the packages that few have, and what serves head size 128 alone (tests/kernels/test_flash.py has that).
GPU_BACKENDS = [b.name for b in BACKENDS if b.name not in ("fa3", "fa4", "triton_cudnn")]
MIXED = {"training.device": "cuda", "training.compute_dtype": "bf16"}


@pytest.fixture(autouse=True)
def fresh_compiler():
    """Every test compiles its own graphs; those of the tests before it count towards Dynamo's limit of one function."""
    torch.compiler.reset()


def relative(got, expected):
    return ((got.double() - expected.double()).norm() / expected.double().norm()).item()


@pytest.mark.parametrize("compile_it", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("length", [127, 128, 255, 257])
@pytest.mark.parametrize("backend", GPU_BACKENDS)
def test_every_backend_against_float64(backend, length, compile_it):
    """Outputs and gradients. bf16 has 8 bits of mantissa (4e-3 a rounding): 2e-2 of the norm leaves room for
    the few roundings of one attention; the float32-only paths are held to the same since the inputs are bf16."""
    g = torch.Generator().manual_seed(length)
    q, k, v, w = (torch.randn(2, length, 3, 64, generator=g).to("cuda", torch.bfloat16) for _ in range(4))
    f = lambda q, k, v: attention(q, k, v, site="self", backend=backend)  # noqa: E731
    f = torch.compile(f, fullgraph=True) if compile_it else f
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    out = f(*leaves)
    (out * w).sum().backward()
    wide = [t.double().requires_grad_() for t in (q, k, v)]
    expected = attention_reference(*wide)
    (expected * w.double()).sum().backward()
    assert relative(out, expected) < 2e-2
    assert all(relative(a.grad, b.grad) < 2e-2 for a, b in zip(leaves, wide, strict=True))


def test_noise_is_the_same_on_every_device():
    k = keys.key(3)
    assert torch.equal(keys.normal(k, (5, 7)), keys.normal(k, (5, 7), device="cuda").cpu())
    draws = sft.draw(sft.Objective(flow_shift=3.0), k, 4, 0, (2, 4, 1, 2, 2))
    assert all(t.device.type == "cpu" for t in (draws.noise, draws.sigma, draws.dropped))


@pytest.mark.parametrize(
    "how",
    [compiled(scan), compiled(scan, memory_budget=0.5), recompute(compiled(scan)), recompute(scan, every=2)],
    ids=["compiled", "budget", "recompute compiled", "recompute"],
)
def test_bf16_gradients_agree_with_the_plain_run(how):
    """The same arithmetic in another fusion: intermediate roundings differ, so the bound is bf16's."""
    cfg = wan.WanConfig(
        num_attention_heads=2, attention_head_dim=64, ffn_dim=256, num_layers=4, in_channels=4, out_channels=4,
        text_dim=16, freq_dim=16,
    )  # fmt: skip
    base = specs.init(wan.param_specs(cfg), keys.key(0), device="cuda")
    base["proj_out.weight"] = keys.normal(keys.key(1), base["proj_out.weight"].shape, device="cuda") * 0.05
    draw = lambda name, *s: keys.normal(keys.fold_in(keys.key(2), name), s, device="cuda")  # noqa: E731
    inputs = model_inputs(
        cfg, draw("x", 1, 4, 3, 16, 16), torch.tensor([500.0], device="cuda"), {"text": draw("t", 1, 8, 16)},
        dtype=torch.bfloat16,
    )  # fmt: skip

    def gradients(run):
        leaves = {k: v.clone().requires_grad_() for k, v in base.items()}
        wan.forward(leaves, cfg, inputs, run=run).float().square().mean().backward()
        return torch.cat([leaves[k].grad.flatten() for k in base])

    assert relative(gradients(Run(scan=how)), gradients(Run())) < 3e-2


def losses(out):
    return [row["loss"] for row in train_rows(read_rows(out / "metrics.jsonl"))]


def run_to(arguments, out, **changes):
    """A run in its own process: cuBLAS reads the deterministic setting once, before any other CUDA work."""
    command = [sys.executable, "-m", "train", *arguments(out, {**MIXED, **changes})]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    return losses(out)


def test_compiled_bf16_training_learns(arguments, tmp_path):
    got = run_to(
        arguments,
        tmp_path / "run",
        **{
            "training.model.enable_torch_compile": True,
            "training.model.enable_gradient_checkpointing_type": "full",
            "training.loop.max_train_steps": 40,
        },
    )
    assert sum(got[-5:]) < 0.8 * sum(got[:5])


def test_deterministic_resume_is_bitwise(arguments, tmp_path):
    """4 + 4 steps equal 8, on the GPU with deterministic kernels."""
    fixed = {"training.deterministic": True}
    whole = run_to(arguments, tmp_path / "whole", **fixed)
    run_to(arguments, tmp_path / "parts", **fixed, **{"training.loop.max_train_steps": 4})
    parts = run_to(
        arguments, tmp_path / "parts", **fixed, **{"training.checkpoint.resume_from_checkpoint": "latest"}
    )
    assert parts == whole and len(whole) == 8
