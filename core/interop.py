"""Between pure functions over flat trees and `nn.Module`s, in both directions."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from core.errors import raise_faults
from core.trees import Params


class ParamsModule(nn.Module):
    """`module(*args, **kw) == forward(params, *bound, *args, **kw)`. Made by `to_module`."""

    def __init__(self, forward: Callable[..., Any], keys: tuple[str, ...], bound: tuple[Any, ...]):
        super().__init__()
        self._pure_forward = forward
        self._keys = keys
        self._bound = bound

    def forward(self, *args, **kwargs):
        return self._pure_forward(self.flat_params(), *self._bound, *args, **kwargs)

    def flat_params(self) -> Params:
        """The flat tree in its first order, as it is now (after `load_state_dict`, `.to`, `functional_call`)."""
        return {key: functools.reduce(getattr, key.split("."), self) for key in self._keys}


def to_module(forward: Callable[..., Any], params: Mapping[str, Tensor], *bound: Any, copy: bool = False,
              trainable: Callable[[str], bool] | None = None) -> ParamsModule:  # fmt: skip
    """A pure function and its tree as an `nn.Module` whose `state_dict` has exactly the tree's keys.

    `module(*args, **kw)` is `forward(params, *bound, *args, **kw)`. Floating leaves become parameters that
    share storage with the given tensors (own storage with `copy=True`); a parameter requires grad when its
    leaf does, or, if `trainable` is given, when `trainable(key)` holds. Other leaves become buffers. Keys
    that hold one tensor stay tied. Raises UserError that lists every key which a module cannot hold.
    """
    raise_faults("to_module: keys that a module cannot hold", _key_faults(params))
    module = ParamsModule(forward, tuple(params), bound)
    leaves: dict[int, Tensor] = {}
    for key, leaf in params.items():
        *parents, name = key.split(".")
        parent = functools.reduce(_container, parents, module)
        if id(leaf) not in leaves:
            leaves[id(leaf)] = _leaf(leaf, leaf.requires_grad if trainable is None else trainable(key), copy)
        held = leaves[id(leaf)]
        if isinstance(held, nn.Parameter):
            parent.register_parameter(name, held)
        else:
            parent.register_buffer(name, held)
    return module


def _leaf(leaf: Tensor, requires_grad: bool, copy: bool) -> Tensor:
    data = leaf.detach().clone() if copy else leaf.detach()
    return nn.Parameter(data, requires_grad=requires_grad) if data.is_floating_point() else data


def _container(parent: nn.Module, name: str) -> nn.Module:
    if name not in parent._modules:
        parent.add_module(name, nn.Module())
    return parent._modules[name]


def _key_faults(params: Mapping[str, Any]) -> list[str]:
    taken = set(dir(ParamsModule(lambda p: p, (), ())))
    faults = []
    for key, leaf in params.items():
        parts = key.split(".")
        inner = [".".join(parts[:i]) for i in range(1, len(parts)) if ".".join(parts[:i]) in params]
        clash = [part for part in parts if part in taken]
        if not isinstance(leaf, Tensor):
            faults.append(f"{key!r} is a {type(leaf).__name__}, not a tensor")
        if not all(parts):
            faults.append(f"{key!r} has an empty component")
        if inner:
            faults.append(f"{key!r} lies below {inner[0]!r}, which is itself a leaf")
        if clash:
            faults.append(f"{key!r} has the component {clash[0]!r}, an attribute of every nn.Module")
    return faults


def from_module(module: nn.Module, *, ties: Mapping[str, str] | None = None,
                mutable: bool = False) -> tuple[Callable[..., Any], Params, Params]:  # fmt: skip
    """An `nn.Module` as `(forward, params, buffers)`.

    `forward(params, buffers, *args, **kw)` equals `module(*args, **kw)` with those tensors and changes
    neither them nor the module. With `mutable=True` it returns `(output, new_buffers)` (BatchNorm's
    statistics). Params share storage with the module; buffers are copies. The module's train/eval mode is
    read at each call.

    Tensors that the module holds under several names are refused, with all names, unless declared in
    `ties` as `{alias: target}`; the alias is then absent from the trees and follows its target.
    """
    ties = {} if ties is None else dict(ties)
    named = dict(module.named_parameters(remove_duplicate=False))
    held = dict(module.named_buffers(remove_duplicate=False))
    raise_faults("from_module: ties", _tie_faults({**named, **held}, ties))
    params = {k: p.detach().requires_grad_(p.requires_grad) for k, p in named.items() if k not in ties}
    buffers = {k: b.detach().clone() for k, b in held.items() if k not in ties}

    def forward(params: Mapping[str, Tensor], buffers: Mapping[str, Tensor], *args, **kwargs):
        _check_keys(params, buffers, named, held, ties)
        # The clones take the module's in-place updates; functional_call writes replaced buffers back here.
        state = {**params, **{k: b.clone() for k, b in buffers.items()}}
        state.update({alias: state[target] for alias, target in ties.items()})
        out = torch.func.functional_call(module, state, args, kwargs, strict=True)
        return (out, {k: state[k] for k in buffers}) if mutable else out

    return forward, params, buffers


def _check_keys(params, buffers, named, held, ties):
    for what, tree, known in (("params", params, named), ("buffers", buffers, held)):
        wanted = [k for k in known if k not in ties]
        faults = [f"missing {k}" for k in wanted if k not in tree]
        faults += [f"unexpected {k}" + (f": tied to {ties[k]}" if k in ties else "") for k in tree if k not in wanted]
        raise_faults(f"{what} do not fit the module", faults)


def _identity(tensor: Tensor) -> Any:
    """Equal for tensors that are the same memory: two parameters over one storage are tied as well."""
    if tensor.data_ptr() == 0:  # meta, empty or distributed: no address to compare
        return id(tensor)
    return tensor.device, tensor.data_ptr(), tuple(tensor.shape), tensor.stride()


def _tie_faults(tensors: Mapping[str, Tensor], ties: Mapping[str, str]) -> list[str]:
    faults = []
    for alias, target in ties.items():
        unknown = [k for k in (alias, target) if k not in tensors]
        if unknown:
            faults.append(f"{alias!r} -> {target!r}: the module has no {unknown[0]!r}")
        elif target in ties:
            faults.append(f"{alias!r} -> {target!r}: the target is itself an alias of {ties[target]!r}")
        elif _identity(tensors[alias]) != _identity(tensors[target]):
            faults.append(f"{alias!r} and {target!r} are declared as tied but are different tensors")
    first: dict[Any, str] = {}
    for name, tensor in tensors.items():
        target = first.setdefault(_identity(tensor), name) if name not in ties else None
        if target not in (None, name):
            faults.append(f"{target!r} and {name!r} are one tensor; declare ties={{{name!r}: {target!r}}}")
    return faults
