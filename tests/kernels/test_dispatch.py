"""What every family of kernels shares: names of backends, reasons, remembered choices, the package's front."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import kernels
from core.errors import UserError
from kernels import dispatch, linear, norm, norm_modulate, plan_attention, qat
from kernels.dispatch import Backend, choose, explain, not_interpreted, remembered, spelled, triton_fault

ROOT = Path(__file__).parents[2]
BACKENDS = (
    Backend("fast", lambda: "fast", lambda request: None if request == "gpu" else "it needs a GPU"),
    Backend("slow", lambda: "slow", lambda request: None),
)


def test_a_name_is_found_however_it_is_spelled_and_a_wrong_one_lists_the_right_ones():
    for name in ("slow", " Slow\n", "SLOW"):
        assert choose("f", BACKENDS, name, "gpu").name == "slow"
    for wrong in ("", "s low", None, 3):
        with pytest.raises(UserError, match="f: unknown backend .*; allowed: auto, fast, slow"):
            choose("f", BACKENDS, wrong, "gpu")
    with pytest.raises(UserError, match="unknown backend 'Fats' .did you mean 'fast'"):
        choose("f", BACKENDS, "Fats", "gpu")
    assert spelled(None) == ""


def test_auto_takes_the_first_usable_of_its_order_and_a_named_one_never_falls_back():
    assert choose("f", BACKENDS, "auto", "gpu").name == "fast"
    assert choose("f", BACKENDS, "Auto", "cpu").name == "slow"
    assert choose("f", BACKENDS, "auto", "gpu", ("slow", "fast")).name == "slow"
    assert not_interpreted("cpu") == ("reference",) and not_interpreted("cuda") is None
    with pytest.raises(UserError, match="f: backend 'fast' cannot serve this call: it needs a GPU"):
        choose("f", BACKENDS, "fast", "cpu")
    with pytest.raises(UserError, match="no backend can serve this call: {'fast': 'it needs a GPU'}"):
        choose("f", BACKENDS, "auto", "cpu", ("fast",))
    assert explain(BACKENDS, "cpu") == {"fast": "it needs a GPU", "slow": "usable"}


def test_every_family_strips_names():
    x = torch.randn(1, 2, 16)
    assert torch.equal(norm_modulate(x, eps=1e-6, backend=" Reference "), norm_modulate(x, eps=1e-6))
    for f in (lambda b: linear.fake_quant(x, "fp8", "weight", backend=b), lambda b: qat.fake_quant_nvfp4(x, backend=b)):
        assert torch.equal(f("REFERENCE"), f("auto"))
    mask = kernels.BlockCausal(2, 3, 1)
    assert plan_attention(mask, head_dim=16, dtype=x.dtype, device="cpu", backend="Reference ").backend == "reference"
    q = x[:, :, None]
    assert qat.qat_attention(q, q, q, backend=" REFERENCE").shape == q.shape


def test_a_decision_is_remembered_but_an_error_is_not_and_neither_is_anything_while_compiling():
    asked = []

    @remembered
    def decide(x):
        asked.append(x)
        if x == "bad":
            raise UserError("bad")
        return [x]

    assert decide(1) is decide(1) and asked == [1]
    for _ in range(2):
        with pytest.raises(UserError):
            decide("bad")
    assert asked == [1, "bad", "bad"]
    assert decide([2]) == [[2]], "facts without a hash"
    before = decide.cache_info()
    torch.compile(lambda x: x + len(decide(3)), fullgraph=True, backend="eager")(torch.ones(1))
    assert decide.cache_info() == before


def test_where_triton_runs_is_a_constant_for_the_compiler(monkeypatch):
    marks = (dispatch.constant_result, torch.compiler.assume_constant_result)
    ours, theirs = (vars(mark(lambda: 0)) for mark in marks)
    assert ours == theirs
    f = lambda x: x + len(triton_fault("meta"))  # noqa: E731
    assert torch.compile(f, fullgraph=True, backend="eager")(torch.zeros(1)).item() == len(triton_fault("meta"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert dispatch._triton_fault.__wrapped__("cuda") == "Triton is not installed"


def test_the_package_exports_what_its_families_do():
    assert list(kernels.__all__) == sorted(kernels.__all__)
    families = [sys.modules["kernels.attention"], linear, norm, qat]
    public = {n for f in families for n in f.__all__ if callable(getattr(f, n)) and not n.endswith("Request")}
    assert set(kernels.__all__) == public - {"Site"}
    assert all(getattr(kernels, n) is getattr(f, n) for f in families for n in f.__all__ if n in kernels.__all__)


@pytest.mark.parametrize(
    "code",
    [
        "import kernels, torch, sys\n"
        "heavy = [n for n in ('torch._dynamo', 'torch._inductor') if n in sys.modules]\n"
        "assert not heavy and not torch.cuda.is_initialized(), heavy\n",
        "import sys; sys.modules['triton'] = None\n"  # as if it were not installed
        "import kernels, torch\n"
        "q = torch.randn(1, 2, 1, 16)\n"
        "why = [kernels.explain_attention(q), kernels.explain_norm(q[0]), kernels.explain_nvfp4(q)]\n"
        "assert [w['triton'] for w in why] == ['Triton is not installed'] * 3\n"
        "kernels.attention(q, q, q, site='self'), kernels.norm_modulate(q[0], eps=1e-6), kernels.fake_quant_nvfp4(q)\n",
    ],
    ids=["cheap", "without Triton"],
)
def test_importing_it_needs_neither_the_compiler_nor_triton_nor_a_driver(code):
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=120)
