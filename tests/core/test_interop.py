"""Pure functions as modules and modules as pure functions: same numbers, same keys, same storage."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from core.errors import UserError
from core.interop import from_module, to_module

KEYS = ("proj.weight", "proj.bias", "blocks.0.mlp.weight", "blocks.1.mlp.weight", "blocks.10.mlp.weight", "table")


def tree(seed=0, requires_grad=False):
    g = torch.Generator().manual_seed(seed)
    shapes = {k: (4,) if k.endswith("bias") or k == "table" else (4, 4) for k in KEYS}
    params = {k: torch.randn(s, generator=g).requires_grad_(requires_grad) for k, s in shapes.items()}
    return {**params, "steps": torch.tensor(3)}


def forward(params, scale, x, *, shift=0.0):
    x = F.linear(x, params["proj.weight"], params["proj.bias"]) * scale + shift
    for i in (0, 1, 10):
        x = x + torch.tanh(F.linear(x, params[f"blocks.{i}.mlp.weight"]))
    return x * params["table"] / params["steps"]


X = torch.linspace(-1, 1, 12).reshape(3, 4)


# --- to_module ---------------------------------------------------------------------------------------------


def test_state_dict_has_the_trees_keys_and_order_of_params():
    params = tree()
    module = to_module(forward, params, 2.0)
    assert set(module.state_dict()) == set(params) and list(module.flat_params()) == list(params)
    assert all(torch.equal(v, params[k]) for k, v in module.state_dict().items())
    assert {k for k, _ in module.named_buffers()} == {"steps"}
    assert torch.equal(module(X, shift=1.0), forward(params, 2.0, X, shift=1.0))


def test_storage_is_shared_unless_copied():
    params = tree()
    shared, own = to_module(forward, params, 1.0), to_module(forward, params, 1.0, copy=True)
    before = own(X)
    with torch.no_grad():
        for leaf in params.values():
            leaf.mul_(2)
    assert torch.equal(shared(X), forward(params, 1.0, X))
    assert torch.equal(own(X), before) and not torch.equal(shared(X), before)


def test_requires_grad_follows_the_leaf_or_the_predicate():
    params = {**tree(requires_grad=True), "table": torch.ones(4)}
    follows = {k: p.requires_grad for k, p in to_module(forward, params, 1.0).named_parameters()}
    assert follows == {k: k != "table" for k in KEYS}
    chosen = to_module(forward, params, 1.0, trainable=lambda k: k.startswith("blocks."))
    assert {k for k, p in chosen.named_parameters() if p.requires_grad} == {k for k in KEYS if "blocks" in k}


def test_load_state_dict_is_strict():
    a, b = to_module(forward, tree(0), 1.0), to_module(forward, tree(1), 1.0)
    assert not torch.equal(a(X), b(X))
    b.load_state_dict(a.state_dict(), strict=True)
    assert torch.equal(a(X), b(X))
    with pytest.raises(RuntimeError, match="Missing key.*table"):
        b.load_state_dict({k: v for k, v in a.state_dict().items() if k != "table"})


def test_an_optimiser_step_equals_one_on_the_tree():
    params, twin = tree(requires_grad=True), tree(requires_grad=True)
    module = to_module(forward, params, 1.0)
    leaves = [twin[k] for k in KEYS]
    for optimizer, out in ((torch.optim.AdamW(module.parameters(), lr=0.1), lambda: module(X)),
                           (torch.optim.AdamW(leaves, lr=0.1), lambda: forward(twin, 1.0, X))):  # fmt: skip
        for _ in range(2):
            optimizer.zero_grad()
            out().square().sum().backward()
            optimizer.step()
    assert all(torch.equal(v, twin[k]) for k, v in module.state_dict().items())
    assert torch.equal(params["table"], twin["table"]), "the tree given is updated in place"


def test_functional_call_deepcopy_and_compile():
    params, other = tree(0), tree(1)
    module = to_module(forward, params, 1.0)
    assert torch.equal(torch.func.functional_call(module, other, (X,)), forward(other, 1.0, X))
    assert torch.equal(module(X), forward(params, 1.0, X))
    twin = copy.deepcopy(module)
    with torch.no_grad():
        twin.get_parameter("table").zero_()
    assert twin(X).abs().sum() == 0 and torch.equal(module(X), forward(params, 1.0, X))
    compiled = torch.compile(module, backend="eager", fullgraph=True)
    assert torch.equal(compiled(X), module(X))
    assert set(compiled._orig_mod.state_dict()) == set(params)


def test_gradients_through_functional_call_equal_those_of_the_tree():
    params = {k: v for k, v in tree().items() if k != "steps"}
    steps = {"steps": torch.tensor(3)}
    module = to_module(forward, {**params, **steps}, 1.0)
    ours = torch.func.grad(lambda p: torch.func.functional_call(module, p, (X,)).sum())(params)
    direct = torch.func.grad(lambda p: forward({**p, **steps}, 1.0, X).sum())(params)
    assert all(torch.equal(ours[k], direct[k]) for k in params)


def test_tied_leaves_stay_tied():
    weight = torch.ones(2, 2, requires_grad=True)
    module = to_module(lambda p, x: x @ p["a.w"] @ p["b.w"], {"a.w": weight, "b.w": weight})
    assert set(module.state_dict()) == {"a.w", "b.w"} and len(list(module.parameters())) == 1
    module(torch.ones(1, 2)).sum().backward()
    assert torch.equal(module.get_parameter("a.w").grad, module.get_parameter("b.w").grad)


def test_keys_that_a_module_cannot_hold_are_all_named():
    t = torch.ones(1)
    with pytest.raises(UserError) as caught:
        to_module(lambda p: 0, {"a": t, "a.b": t, "x..y": t, "": t, "blocks.0.forward": t, "n": 3})
    for words in ("'a.b' lies below 'a'", "'x..y' has an empty", "'' has an empty", "'forward'", "'n' is a int"):
        assert words in str(caught.value)


NAMES = st.lists(st.sampled_from(["w", "0", "1", "norm", "to_q", "weight"]), min_size=1, max_size=4).map(".".join)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(st.dictionaries(NAMES, st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool]), max_size=6))
def test_any_tree_round_trips(dtypes):
    keys = [k for k in dtypes if not any(other.startswith(k + ".") for other in dtypes)]
    params = {k: torch.ones(2, dtype=dtypes[k]) * i for i, k in enumerate(keys)}
    module = to_module(lambda p: {k: v + 0 for k, v in p.items()}, params)
    run, floats, others = from_module(module)
    assert set(floats) == {k for k in params if params[k].is_floating_point()} and set(others) == set(params) - set(
        floats
    )
    out = run(floats, others)
    assert list(out) == list(params)
    assert all(torch.equal(out[k], params[k] + 0) and out[k].dtype == (params[k] + 0).dtype for k in params)


# --- from_module -------------------------------------------------------------------------------------------


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        return self.head(torch.tanh(self.embed(tokens)))


def norm_net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.GELU(), nn.Linear(4, 2))


@pytest.mark.parametrize("make", [
    norm_net, lambda: nn.Linear(4, 3),
    lambda: nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True), lambda: nn.GRU(4, 3),
])  # fmt: skip
def test_the_function_equals_the_module(make):
    module = make().eval()
    run, params, buffers = from_module(module)
    ours, theirs = run(params, buffers, X), module(X)
    ours, theirs = (o[0] if isinstance(o, tuple) else o for o in (ours, theirs))
    assert torch.equal(ours, theirs)
    grads = torch.func.grad(lambda p: (o[0] if isinstance(o := run(p, buffers, X), tuple) else o).square().sum())(
        params
    )
    theirs.square().sum().backward()
    for name, p in module.named_parameters():
        torch.testing.assert_close(grads[name], p.grad)


def test_training_batchnorm_is_pure_and_its_new_statistics_can_be_had():
    module, twin = norm_net().train(), norm_net().train()
    before = copy.deepcopy(module.state_dict())
    run, params, buffers = from_module(module, mutable=True)
    held = {k: v.clone() for k, v in buffers.items()}
    out, new = run(params, buffers, X)
    assert torch.equal(out, twin(X))
    for name, buffer in twin.named_buffers():
        assert torch.equal(new[name], buffer) and torch.equal(buffers[name], held[name])
        assert not torch.equal(new[name], held[name])
    assert all(torch.equal(v, before[k]) for k, v in module.state_dict().items())
    assert torch.equal(from_module(module)[0](params, buffers, X), out)


def test_a_replaced_buffer_is_returned():
    class Counter(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, x):
            self.seen = self.seen + x
            return self.seen * 2

    module = Counter()
    run, params, buffers = from_module(module, mutable=True)
    out, new = run(params, buffers, 3.0)
    assert out == 6 and new["seen"] == 3 and buffers["seen"] == 0 and module.seen == 0


def test_params_share_storage_and_flags():
    module = norm_net()
    module[0].weight.requires_grad_(False)
    _, params, _ = from_module(module)
    assert params["0.weight"].data_ptr() == module[0].weight.data_ptr()
    assert {k for k, p in params.items() if not p.requires_grad} == {"0.weight"}


def test_ties_are_refused_unless_declared():
    module = Tied()
    with pytest.raises(
        UserError, match=r"'embed.weight' and 'head.weight' are one tensor.*ties=\{'head.weight': 'embed"
    ):
        from_module(module)
    run, params, buffers = from_module(module, ties={"head.weight": "embed.weight"})
    tokens = torch.tensor([[0, 3, 1]])
    assert list(params) == ["embed.weight"] and torch.equal(run(params, buffers, tokens), module(tokens))
    grads = torch.func.grad(lambda p: run(p, buffers, tokens).square().sum())(params)
    module(tokens).square().sum().backward()
    torch.testing.assert_close(grads["embed.weight"], module.embed.weight.grad)
    with pytest.raises(UserError, match="unexpected head.weight: tied to embed.weight"):
        run({**params, "head.weight": params["embed.weight"]}, buffers, tokens)


def test_two_parameters_over_one_storage_are_tied_too():
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    module[1].weight = nn.Parameter(module[0].weight.detach())
    with pytest.raises(UserError, match="'0.weight' and '1.weight' are one tensor"):
        from_module(module)


@pytest.mark.parametrize("ties, words", [
    ({"1.weight": "0.weight"}, "'1.weight' and '0.weight' are declared as tied but are different"),
    ({"1.wight": "0.weight"}, "no '1.wight'"),
    ({"0.weight": "1.weight", "1.weight": "0.weight"}, "itself an alias"),
])  # fmt: skip
def test_wrong_ties_are_refused(ties, words):
    with pytest.raises(UserError, match=words):
        from_module(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), ties=ties)


def test_missing_and_unexpected_keys_are_all_named():
    run, params, buffers = from_module(norm_net())
    with pytest.raises(UserError) as caught:
        run({"0.weight": params["0.weight"], "extra": X}, buffers, X)
    assert all(w in str(caught.value) for w in ("missing 0.bias", "missing 3.weight", "unexpected extra"))
