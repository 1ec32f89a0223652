"""One optimiser step over microbatches, and the metrics row that it becomes."""

import dataclasses
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from core import devices, keys
from core.errors import UserError
from core.trees import Params
from parallel.launch import gathered, summed
from parallel.norms import clip_
from parallel.sequence import sequence_parallel
from train import optim
from train.layout import DATA
from train.rows import Batch
from train.schedules import learning_rate
from train.setup import Setup
from train.state import TrainState

SIGMA_BINS = 4

Named = dict[str, Tensor]


@dataclasses.dataclass(frozen=True)
class Step:
    """What one optimiser step leaves on the device: tensors that are read only after it. All are of this process's
    samples, but for the norm.

    Of every stream that has a loss, `losses` is the mean squared error per element of every sample, `sigmas` their
    noise levels, and `means` the mean of the errors over all elements. `tokens` and `flops` are those of one pass over
    the samples.
    """

    loss: Tensor
    grad_norm: Tensor
    means: dict[str, Tensor]
    losses: dict[str, Tensor]
    sigmas: dict[str, Tensor]
    names: list[str]
    tokens: int
    flops: int


def moved(batch: Batch, device: torch.device) -> Batch:
    """The batch with its tensors on a device."""
    to = lambda channels: {k: v.to(device) for k, v in channels.items()}  # noqa: E731
    return dataclasses.replace(batch, targets=to(batch.targets), conditions=to(batch.conditions))


def microbatch_loss(setup: Setup, state: TrainState, batch: Batch, first: int) -> tuple[Named, Named]:
    """Summed squared errors and sigmas by stream, each `[B]`, of a microbatch; its first sample is number `first` of
    the step.
    """
    family, cfg = setup.family, setup.cfg
    draws = family.draw(cfg, setup.objective, keys.fold_in(state.key, "sft"), state.step, first, batch)
    draws = draws.to(setup.device)
    errors = state.call(
        family.loss,
        cfg,
        setup.objective,
        moved(batch, setup.device),
        {k: v.to(setup.device) for k, v in setup.empty.items()},
        draws,
        dtype=setup.compute,
        run=sequence_parallel(setup.run, setup.mesh, video_tokens(setup, batch)) if family.cut(cfg) else setup.run,
    )
    return errors, {k: draws.sigmas[k] for k in errors}


def add_gradients(sums: Params, params: Params) -> None:
    """Moves the gradients of a microbatch into float32 `sums`, those of 16-bit leaves; others add up in place.

    Sharded leaves may have none before the last microbatch.
    """
    for k, p in params.items():
        if p.grad is None:
            continue
        if p.dtype.itemsize < 4:
            sums[k] = sums[k] + p.grad if k in sums else p.grad.float()
            p.grad = None
        else:
            sums[k] = p.grad


def train_step(setup: Setup, state: TrainState, micro: list[Batch]) -> Step:
    """One optimiser step over this process's shares of all microbatches, in place. Nothing is copied to the host.

    The loss of a stream is the sum of squared errors of all microbatches over their number of elements, so unequal
    microbatches weigh by their tokens; the loss is the weighted sum of those of the streams. Shares of a microbatch
    are equal in number and shape, so the average of the processes' gradients, which sharded leaves have, is the
    gradient over all processes.
    """
    training, mesh, weights = setup.recipe.training, setup.mesh, setup.objective.weights
    elements = {name: sum(batch.targets[name].numel() for batch in micro) for name in weights}
    losses, sigmas, first = [], [], 0
    grads: Params = {}
    for number, batch in enumerate(micro, 1):
        if state.sharded is not None:
            state.sharded.microbatch(last=number == len(micro))
        n = len(batch.names)
        errors, levels = microbatch_loss(setup, state, batch, first + mesh.index(*DATA) * n)
        sum(w * errors[name].sum() / elements[name] for name, w in weights.items()).backward()
        add_gradients(grads, state.params)
        losses.append({name: errors[name].detach() / batch.targets[name][0].numel() for name in weights})
        sigmas.append(levels)
        first += mesh.size(*DATA) * n
    norm = clip_(grads, setup.recipe.callbacks.grad_clip.max_grad_norm)
    o = training.optimizer
    opt = optim.AdamW(o.betas, o.eps, o.weight_decay, o.fused)
    optim.adamw_update(opt, grads, state.optimizer, state.trained, rate_of(setup, state.step))
    for p in state.params.values():
        p.grad = None
    state.step += 1
    state.position += first
    update_ema(setup, state)
    means = {name: _mean(losses, micro, name, elements[name]) for name in weights}
    lengths = [setup.family.lengths(setup.cfg, batch, setup.empty) for batch in micro]
    return Step(
        loss=sum(w * means[name] for name, w in weights.items()),
        grad_norm=norm,
        means=means,
        losses={name: torch.cat([part[name] for part in losses]) for name in weights},
        sigmas={name: torch.cat([part[name] for part in sigmas]) for name in weights},
        names=[name for batch in micro for name in batch.names],
        tokens=sum(made(of, batch) * len(batch.names) for of, batch in zip(lengths, micro, strict=True)),
        flops=sum(
            setup.family.flops(setup.cfg, setup.frozen, of) * len(batch.names)
            for of, batch in zip(lengths, micro, strict=True)
        ),
    )


def _mean(losses: Sequence[Named], micro: Sequence[Batch], name: str, elements: int) -> Tensor:
    """Mean error over all elements of one stream, from the means of samples in each microbatch."""
    parts = zip(losses, micro, strict=True)
    return sum(part[name].sum() * batch.targets[name][0].numel() for part, batch in parts) / elements


def made(lengths: Mapping[str, int], batch: Batch) -> int:
    """Tokens of one sample that the model makes: those of texts and pictures are given."""
    return sum(lengths[name] for name in batch.targets)


def video_tokens(setup: Setup, batch: Batch) -> int:
    """Video tokens of one sample after patchify."""
    return setup.family.lengths(setup.cfg, batch, setup.empty)["video"]


def rate_of(setup: Setup, step: int) -> float:
    """Learning rate of the 0-based optimiser step."""
    o = setup.recipe.training.optimizer
    return learning_rate(
        step,
        o.learning_rate,
        scheduler=o.lr_scheduler,
        total_steps=setup.recipe.training.loop.max_train_steps,
        warmup_steps=o.lr_warmup_steps,
        min_lr_ratio=o.min_lr_ratio,
    )


def update_ema(setup: Setup, state: TrainState) -> None:
    """Moves the average after a step; until `start_iter` it follows the weights."""
    if state.ema is not None:
        ema = setup.recipe.callbacks.ema
        optim.ema_update(state.ema, state.params, 0.0 if state.step <= ema.start_iter else ema.decay)


# --- what a step is reported as -------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Reading:
    """What a process measured of a step: seconds that it waited for data, seconds from when all processes had done the
    step before until it had done this one and only had to hear of the others, and its memory's peak in bytes so far.
    """

    data: float
    busy: float
    peak: float


@dataclasses.dataclass(frozen=True)
class Figures:
    """A step over all processes, equal on all of them.

    `means` and `loss_by_sigma` are by stream, the latter also over all of them as `""`. `signals`: by how many
    processes each was received.
    """

    loss: float
    grad_norm: float
    means: dict[str, float]
    loss_by_sigma: dict[str, list[float | None]]
    readings: list[Reading]
    signals: dict[int, int]


def sigma_sums(losses: Tensor, sigmas: Tensor) -> tuple[list[float], list[int]]:
    """Sum of losses and number of samples in each of SIGMA_BINS equal bins of sigma."""
    bins = (sigmas * SIGMA_BINS).long().clamp(max=SIGMA_BINS - 1)
    chosen = [losses[bins == b].double() for b in range(SIGMA_BINS)]
    return [float(c.sum()) for c in chosen], [len(c) for c in chosen]


def figures_of(setup: Setup, step: Step, waited: float, since: float, signals: Mapping[int, int]) -> Figures:
    """The step's figures over all processes, by one small all-reduce of what this process reads from its device.

    So all see the same signals after the same step, and stop together. Collective over the mesh.

    Args:
        waited: seconds that this process waited for data.
        since: `time.perf_counter()` when the step before was done.
        signals: `{number: whether this process received it}`, with equal keys on all processes.
    """
    mesh, weight, streams = setup.mesh, float(step.tokens), list(step.losses)
    binned = {name: sigma_sums(step.losses[name].cpu(), step.sigmas[name].cpu()) for name in streams}
    # The device has done the step by now.
    totals = [weight * float(x) for x in (step.loss, *step.means.values())]
    norm = float(step.grad_norm)
    places, at = [0.0] * (3 * mesh.world), 3 * mesh.index(*mesh.sizes)
    peak = devices.memory_stats(setup.device)["peak_bytes"]
    places[at : at + 3] = waited, time.perf_counter() - since, peak
    bins = [x for name in streams for part in binned[name] for x in part]
    out = iter(summed([weight, *totals, *bins, *signals.values(), *places], mesh))
    take = lambda n: [next(out) for _ in range(n)]  # noqa: E731
    (weights,) = take(1)
    loss, *means = (total / weights for total in take(1 + len(streams)))
    sums = {name: (take(SIGMA_BINS), take(SIGMA_BINS)) for name in streams}
    sums[""] = tuple([sum(column) for column in zip(*parts, strict=True)] for parts in zip(*sums.values(), strict=True))
    by_sigma = {
        name: [s / n if n else None for s, n in zip(*pair, strict=True)] for name, pair in sums.items()
    }  # fmt: skip
    heard = {number: int(n) for number, n in zip(signals, take(len(signals)), strict=True)}
    readings = [Reading(*take(3)) for _ in range(mesh.world)]
    return Figures(loss, norm, dict(zip(streams, means, strict=True)), by_sigma, readings, heard)


def slowest(seconds: Sequence[float]) -> int:
    """The rank that took longest."""
    return max(range(len(seconds)), key=seconds.__getitem__)


def train_row(setup: Setup, step: Step, figures: Figures, lr: float, number: int, seconds: float) -> dict:
    """The values of a metrics row."""
    mesh = setup.mesh
    peak = devices.peak_flops(setup.device) if setup.compute == torch.bfloat16 else None
    data, busy = [r.data for r in figures.readings], [r.busy for r in figures.readings]
    row = {
        "step": number,
        "loss": figures.loss,
        "lr": lr,
        "loss_by_sigma": figures.loss_by_sigma[""],
        "seconds": seconds,
        "data_seconds": max(data),
        "tokens_per_second": step.tokens * mesh.size(*DATA) / seconds,
        "mfu": None if peak is None else step.flops * mesh.size(*DATA) / seconds / peak / mesh.world,
        "peak_memory_bytes": int(max(r.peak for r in figures.readings)),
    }
    if len(figures.means) > 1:
        row |= {f"loss_{name}": value for name, value in figures.means.items()}
        row |= {f"loss_by_sigma_{name}": figures.loss_by_sigma[name] for name in figures.means}
    if mesh.world > 1:
        row |= {"data_rank": slowest(data), "straggler_rank": slowest(busy), "straggler_seconds": max(busy) - min(busy)}
    if setup.recipe.callbacks.grad_clip.log_grad_norms:
        row["grad_norm"] = figures.grad_norm
    return row


def check_finite(setup: Setup, step: Step, figures: Figures, number: int, last: Path | None) -> None:
    """Stops the run at a loss or gradient norm that is not finite, on all processes; nothing is saved after it."""
    if math.isfinite(figures.loss) and math.isfinite(figures.grad_norm):
        return
    finite = torch.stack(list(step.losses.values())).isfinite().all(0).tolist()
    own = [list(pair) for pair in zip(step.names, finite, strict=True)]
    # Processes that share samples name them alike.
    samples = {name: finite for part in gathered(own, setup.mesh) for name, finite in part}
    bad = [name for name, finite in samples.items() if not finite]
    kept = "no checkpoint was saved yet" if last is None else f"the last good checkpoint is {last}"
    raise UserError(
        f"step {number}: loss is {figures.loss}, gradient norm {figures.grad_norm}; samples of this step: "
        f"{', '.join(samples)}" + (f"; not finite: {', '.join(bad)}" if bad else "") + f"; {kept}"
    )
