"""Functions of tensors as CUDA graphs: recorded once per signature, then replayed without any work of the host.

A model of many short kernels is bound by their launches; a replay starts them all at once.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from core.trees import map_tree

WARMUP = 2  # calls before a recording, in which kernels are compiled and workspaces allocated

Inputs = Mapping[str, Tensor]
Signature = tuple[tuple[str, tuple[int, ...], torch.dtype, torch.device], ...]


def signature(inputs: Inputs) -> Signature:
    """What a recording depends on: names, shapes, dtypes and devices."""
    return tuple((k, tuple(v.shape), v.dtype, v.device) for k, v in sorted(inputs.items()))


def _record(fn: Callable[[Inputs], Any], inputs: Inputs) -> Callable[[Inputs], Any]:
    """Records one call; the result copies its inputs to where the recording reads them, and replays it."""
    static = {k: v.clone() for k, v in inputs.items()}
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARMUP):
            fn(static)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = fn(static)

    def replay(inputs: Inputs) -> Any:
        for k, v in static.items():
            v.copy_(inputs[k])
        graph.replay()
        return out

    return replay


def replayed(fn: Callable[[Inputs], Any]) -> Callable[[Inputs], Any]:
    """`fn`, recorded at its first call with inputs of a signature and replayed from then on.

    Args:
        fn: from a flat dict of CUDA tensors to a tree of tensors, without host synchronisation, the same work whatever
            the values. What it closes over (weights) is read where it lies, so it must stay there.

    Returns:
        A function of the same inputs. Its results are fresh copies. Memory of the recordings stays taken as long as it
        lives. Inputs that are not on a GPU go to `fn` itself, and with gradients enabled nothing is recorded either.
    """
    recordings: dict[Signature, Callable[[Inputs], Any]] = {}

    def call(inputs: Inputs) -> Any:
        if torch.is_grad_enabled() or not all(v.is_cuda for v in inputs.values()):
            return fn(inputs)
        key = signature(inputs)
        if key not in recordings:
            recordings[key] = _record(fn, inputs)
        return map_tree(torch.clone, recordings[key](inputs))

    return call
