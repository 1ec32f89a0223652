"""Devices, with stand-ins for the ones that this machine lacks."""

import resource
import sys

import pytest
import torch

from core import devices
from core.errors import UserError


@pytest.fixture
def machine(monkeypatch):
    """`machine(cuda=2, mps=True)` makes PyTorch report these devices."""

    def machine(cuda=0, mps=False, capability=(9, 0), name="NVIDIA H200"):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: cuda)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
        monkeypatch.setattr(torch.backends.mps, "is_available", lambda: mps)

    return machine


@pytest.mark.parametrize("has, best, names", [
    ({}, "cpu", ["cpu"]),
    ({"mps": True}, "mps", ["mps", "cpu"]),
    ({"cuda": 2}, "cuda", ["cuda:0", "cuda:1", "cpu"]),
    ({"cuda": 1, "mps": True}, "cuda", ["cuda:0", "mps", "cpu"]),
])  # fmt: skip
def test_preference_is_cuda_mps_cpu(machine, has, best, names):
    machine(**has)
    assert devices.available() == names
    # No index: the process's current device, never card 0 by assumption.
    assert devices.preferred_device() == torch.device(best) == devices.resolve(None)


@pytest.mark.parametrize("has, device", [
    ({}, "cpu"), ({}, "cpu:0"), ({"mps": True}, "mps"), ({"mps": True}, "mps:0"),
    ({"cuda": 2}, "cuda"), ({"cuda": 2}, "cuda:1"), ({"cuda": 2}, "cpu"),
])  # fmt: skip
def test_resolve_keeps_what_exists(machine, has, device):
    machine(**has)
    assert devices.resolve(device) == torch.device(device) == devices.resolve(torch.device(device))


@pytest.mark.parametrize("has, device", [
    ({}, "cuda"), ({}, "cuda:0"), ({}, "mps"), ({"cuda": 2}, "cuda:2"), ({"cuda": 2}, "mps"), ({"mps": True}, "cuda"),
    ({}, "gpu"), ({}, ""), ({}, "meta"), ({"mps": True}, "mps:1"),
])  # fmt: skip
def test_resolve_names_what_is_available(machine, has, device):
    machine(**has)
    with pytest.raises(UserError) as caught:
        devices.resolve(device)
    assert repr(device) in str(caught.value)
    assert f"available: {', '.join(devices.available())}" in str(caught.value)


def test_dtypes(machine):
    machine(cuda=1)
    assert devices.highest_float("mps") == devices.highest_float(torch.device("mps", 0)) == torch.float32
    assert devices.highest_float("cpu") == devices.highest_float("cuda:1") == torch.float64
    assert devices.default_compute_dtype("cuda") == torch.bfloat16
    assert devices.default_compute_dtype("cpu") == devices.default_compute_dtype("mps") == torch.float32
    machine(cuda=1, capability=(7, 5))
    assert devices.default_compute_dtype("cuda") == torch.float32


def test_calls_reach_the_device_asked_for(monkeypatch):
    calls = []
    for module, names in ((torch.mps, ("synchronize", "empty_cache")), (torch.cuda, ("synchronize",)),
                          (torch.cuda, ("reset_peak_memory_stats",))):  # fmt: skip
        for name in names:
            monkeypatch.setattr(module, name, lambda *a, at=f"{module.__name__}.{name}": calls.append((at, *a)))
    for fn in (devices.synchronize, devices.empty_cache, devices.reset_peak_memory):
        fn("cpu")
    assert calls == []
    devices.synchronize("mps")
    devices.empty_cache("mps")
    devices.reset_peak_memory("mps")
    devices.synchronize("cuda:1")
    devices.reset_peak_memory("cuda:1")
    card = torch.device("cuda:1")
    assert calls == [("torch.mps.synchronize",), ("torch.mps.empty_cache",), ("torch.cuda.synchronize", card),
                     ("torch.cuda.reset_peak_memory_stats", card)]  # fmt: skip


def test_memory_of_other_devices(monkeypatch):
    monkeypatch.setattr(torch.mps, "current_allocated_memory", lambda: 5)
    monkeypatch.setattr(torch.mps, "driver_allocated_memory", lambda: 9)
    assert devices.memory_stats("mps") == {"allocated_bytes": 5, "peak_bytes": 9}
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 10 + device.index)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 20 + device.index)
    assert devices.memory_stats("cuda:1") == {"allocated_bytes": 11, "peak_bytes": 21}


def test_cpu_memory_sees_a_large_tensor():
    before = devices.memory_stats("cpu")
    held = torch.ones(2**25)  # 128 MiB, touched
    after = devices.memory_stats("cpu")
    # Half the tensor's size leaves room for pages that were free before.
    assert after["peak_bytes"] >= after["allocated_bytes"] > 2**26
    if sys.platform == "linux":
        assert after["allocated_bytes"] - before["allocated_bytes"] > held.nbytes / 2
    unit = 1 if sys.platform == "darwin" else 1024
    assert after["peak_bytes"] <= resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit * 1.1


@pytest.mark.parametrize("name, tera", [
    ("NVIDIA H100 80GB HBM3", 989.4), ("NVIDIA H100 PCIe", 756), ("NVIDIA H100 NVL", 835.5), ("NVIDIA H200", 989.4),
    ("NVIDIA A100-SXM4-80GB", 312), ("NVIDIA A100-PCIE-40GB", 312), ("NVIDIA A10", 125), ("NVIDIA B200", 2250),
    ("NVIDIA L40S", 362.05), ("NVIDIA L40", 181.05), ("NVIDIA L4", 121), ("NVIDIA GeForce RTX 4090", 165.2),
    ("NVIDIA GeForce RTX 4090 D", None), ("NVIDIA GeForce RTX 4090 Laptop GPU", None), ("Tesla V100-SXM2-16GB", None),
    ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None), ("NVIDIA H20", None), ("", None),
])  # fmt: skip
def test_peak_flops_by_name(machine, name, tera):
    machine(cuda=1, name=name)
    assert devices.peak_flops("cuda") == (None if tera is None else tera * 1e12)
    assert devices.peak_flops("cpu") is None and devices.peak_flops("mps") is None
