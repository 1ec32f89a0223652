"""Keys: values that can never change, independence, and draws that depend on nothing else."""

import hashlib
import struct

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from core import keys
from core.errors import UserError
from core.keys import Key

INT64 = st.integers(-(2**63), 2**63 - 1)
DATA = st.one_of(INT64, st.text(max_size=8))

# Committed: seeds in recipes, published samples and resumed runs all rest on them.
GOLDEN = {
    "key(0)": (keys.key(0), (3884276138100438136, -1790666776532889924)),
    "key(1)": (keys.key(1), (-6962807862386839903, 4339087325647035721)),
    "key(-1)": (keys.key(-1), (8827267281284576711, 331439726677123202)),
    "key(2**63 - 1)": (keys.key(2**63 - 1), (-1377919702204819258, 9200941760681730206)),
    "key(-2**63)": (keys.key(-(2**63)), (1933398669240776333, -6958499786527958004)),
    "a parameter": (
        keys.fold_in(keys.key(0), "blocks.0.attn1.to_q.weight"),
        (-3928543052767532940, -453467137729118104),
    ),
    "the empty name": (keys.fold_in(keys.key(0), ""), (-5056277083347836912, -2167122597803507798)),
    "not ASCII": (keys.fold_in(keys.key(0), "ü"), (8405533561746699164, -6028021786700011444)),
    "an index": (keys.fold_in(keys.key(0), 7), (7308824667104121038, -8780757958001173032)),
    "a negative index": (keys.fold_in(keys.key(0), -7), (6291747703192370221, 700735168180812893)),
    "third of a split": (keys.split(keys.key(0), 3)[2], (-6101723287977115724, 6820312390324753429)),
}


@pytest.mark.parametrize("what", GOLDEN)
def test_values_never_change(what):
    found, committed = GOLDEN[what]
    assert tuple(found) == committed


@given(hi=INT64, lo=INT64, data=DATA)
def test_the_hash_is_the_documented_one(hi, lo, data):
    """BLAKE2b, 16 bytes, over the key and the tagged data, all little-endian: anyone can compute it."""
    tagged = b"s" + data.encode() if isinstance(data, str) else b"i" + data.to_bytes(8, "little", signed=True)
    digest = hashlib.blake2b(struct.pack("<qq", hi, lo) + tagged, digest_size=16).digest()
    assert keys.fold_in(Key(hi, lo), data) == Key(
        int.from_bytes(digest[:8], "little", signed=True), int.from_bytes(digest[8:], "little", signed=True)
    )


@given(k=st.builds(Key, INT64, INT64), a=DATA, b=DATA)
def test_unlike_data_gives_unlike_keys(k, a, b):
    assert (keys.fold_in(k, a) == keys.fold_in(k, b)) == (a == b)
    assert keys.fold_in(k, a) != k
    # Order matters: (step, sample) is not (sample, step).
    assert (keys.fold_in(keys.fold_in(k, a), b) == keys.fold_in(keys.fold_in(k, b), a)) == (a == b)


def test_a_number_is_not_its_digits():
    assert keys.fold_in(keys.key(0), 1) != keys.fold_in(keys.key(0), "1")


@given(seed=INT64, n=st.integers(1, 20))
def test_splits_are_distinct_and_longer_ones_begin_alike(seed, n):
    k = keys.key(seed)
    assert len({*keys.split(k, n), k, *(keys.fold_in(k, i) for i in range(n))}) == 2 * n + 1
    assert keys.split(k, n + 3)[:n] == keys.split(k, n)


@given(hi=INT64, lo=INT64)
def test_keys_survive_a_checkpoint(hi, lo):
    stored = keys.to_tensor(Key(hi, lo))
    assert stored.dtype == torch.int64 and stored.shape == (2,)
    assert keys.from_tensor(stored) == Key(hi, lo)


@pytest.mark.parametrize("seed", [2**63, -(2**63) - 1, 10**30])
def test_seeds_outside_int64_are_refused(seed):
    with pytest.raises(UserError, match=f"{seed} is outside int64"):
        keys.key(seed)
    with pytest.raises(UserError, match="outside int64"):
        keys.fold_in(keys.key(0), seed)


def test_a_float_is_no_seed():
    """1.5 must not silently be seed 1."""
    with pytest.raises(TypeError):
        keys.key(1.5)


DRAWS = {
    "normal": lambda k: keys.normal(k, (5, 7)),
    "uniform": lambda k: keys.uniform(k, (5, 7)),
    "permutation": lambda k: torch.tensor(keys.permutation(k, 50)),
}


@pytest.mark.parametrize("name", DRAWS)
def test_draws_depend_on_the_key_alone_and_leave_the_global_generator(name):
    torch.manual_seed(1)
    first = DRAWS[name](keys.key(3))
    before = torch.get_rng_state()
    torch.manual_seed(2)
    other_state = torch.get_rng_state()
    assert torch.equal(DRAWS[name](keys.key(3)), first)
    assert torch.equal(torch.get_rng_state(), other_state) and not torch.equal(before, other_state)
    assert not torch.equal(DRAWS[name](keys.key(4)), first)


def test_draws_are_made_in_float32_and_then_cast():
    k = keys.key(0)
    for dtype in (torch.float64, torch.bfloat16, torch.float16):
        assert torch.equal(keys.normal(k, (9,), dtype), keys.normal(k, (9,)).to(dtype))
        assert torch.equal(keys.uniform(k, (9,), dtype), keys.uniform(k, (9,)).to(dtype))


def test_moments_and_bounds():
    """40,000 draws: a mean is known to 0.5 % of a deviation, a variance to 0.7 %; bounds of five times that."""
    k, shape = keys.key(0), (40_000,)
    n, u = keys.normal(k, shape), keys.uniform(k, shape)
    assert abs(n.mean()) < 0.025 and abs(n.var() - 1) < 0.035
    assert 0 <= u.min() and u.max() < 1 and abs(u.mean() - 0.5) < 0.0075
    assert sorted(keys.permutation(k, 100)) == list(range(100))


def test_draws_never_change():
    """Committed. Philox's bits are fixed for ever; the normal transform is numpy's, hence the tolerance."""
    k = keys.key(0)
    assert keys.uniform(k, (3,)).tolist() == [0.6513873338699341, 0.8984513878822327, 0.5633150935173035]
    expected = torch.tensor([1.3195244, -0.6060053, -0.7892578])
    torch.testing.assert_close(keys.normal(k, (3,)), expected, atol=1e-6, rtol=0)
    assert keys.permutation(k, 8) == [2, 6, 5, 1, 7, 4, 3, 0]


def test_all_bits_of_a_key_count():
    """Keys that differ in one bit of either half draw different numbers."""
    base = keys.normal(Key(0, 0), (4,))
    for bit in range(64):
        one = 2**bit if bit < 63 else -(2**63)
        assert not torch.equal(keys.normal(Key(one, 0), (4,)), base), bit
        assert not torch.equal(keys.normal(Key(0, one), (4,)), base), bit
