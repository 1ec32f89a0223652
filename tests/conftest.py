"""Shared settings: deterministic hypothesis, few threads, no network, Triton's interpreter where there is no GPU."""

import os

import pytest
import torch
from hypothesis import HealthCheck, settings

if not torch.cuda.is_available():  # before anything imports Triton, which reads it once
    os.environ.setdefault("TRITON_INTERPRET", "1")

COMMON = {"deadline": None, "suppress_health_check": list(HealthCheck), "derandomize": True}
settings.register_profile("quick", max_examples=15, **COMMON)
settings.register_profile("slow", max_examples=200, **COMMON)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick"))


@pytest.fixture(scope="session", autouse=True)
def few_threads():
    """One thread per worker: the suite runs two workers on two cores."""
    torch.set_num_threads(1)
    os.environ["HF_HUB_OFFLINE"] = "1"
