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
from train import optim, sft
from train.flops import train_flops
from train.layout import DATA
from train.rows import Batch
from train.schedules import learning_rate
from train.setup import Setup
from train.state import TrainState

SIGMA_BINS = 4


@dataclasses.dataclass(frozen=True)
class Step:
    """What one optimiser step leaves on the device: tensors that are read only after it. All are of this process's
    samples, but for the norm.

    `losses` is the mean squared error per element of every sample, `sigmas` their noise levels, `tokens` and `flops`
    those of one pass over the samples.
    """

    loss: Tensor
    grad_norm: Tensor
    losses: Tensor
    sigmas: Tensor
    names: list[str]
    tokens: int
    flops: int


def fit_text(text: Tensor, length: int) -> Tensor:
    """Text embeddings `[B, L, D]` padded with zeros, or cut, to `[B, length, D]`."""
    return torch.nn.functional.pad(text[:, :length], (0, 0, 0, max(0, length - text.shape[1])))


def microbatch_loss(setup: Setup, state: TrainState, batch: Batch, first: int) -> tuple[Tensor, Tensor]:
    """Summed squared errors and sigmas, each `[B]`, of a microbatch; its first sample is number `first` of the step."""
    clean = batch.latents.to(setup.device)
    conditions = {k: batch.conditions[k].to(setup.device) for k in ("text", *sft.image_channels(setup.cfg))}
    conditions["text"] = fit_text(conditions["text"], setup.text_length)
    draws = sft.draw(setup.objective, keys.fold_in(state.key, "sft"), state.step, first, tuple(clean.shape))
    draws = sft.Draws(*(t.to(setup.device) for t in (draws.noise, draws.sigma, draws.dropped)))
    errors = state.call(
        sft.loss,
        setup.cfg,
        setup.objective,
        clean,
        conditions,
        setup.empty.to(setup.device),
        draws,
        dtype=setup.compute,
        run=sequence_parallel(setup.run, setup.mesh, tokens_of(setup, batch)),
    )
    return errors, draws.sigma


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

    The loss is the sum of squared errors of all microbatches over their number of elements, so unequal
    microbatches weigh by their tokens. Shares of a microbatch are equal in number and shape, so the average of the
    processes' gradients, which sharded leaves have, is the gradient over all processes.
    """
    training, mesh = setup.recipe.training, setup.mesh
    elements = sum(batch.latents.numel() for batch in micro)
    losses, sigmas, first = [], [], 0
    grads: Params = {}
    for number, batch in enumerate(micro, 1):
        if state.sharded is not None:
            state.sharded.microbatch(last=number == len(micro))
        n = len(batch.names)
        errors, sigma = microbatch_loss(setup, state, batch, first + mesh.index(*DATA) * n)
        (errors.sum() / elements).backward()
        add_gradients(grads, state.params)
        losses.append(errors.detach() / batch.latents[0].numel())
        sigmas.append(sigma)
        first += mesh.size(*DATA) * n
    norm = clip_(grads, setup.recipe.callbacks.grad_clip.max_grad_norm)
    o = training.optimizer
    opt = optim.AdamW(o.betas, o.eps, o.weight_decay, o.fused)
    optim.adamw_update(opt, grads, state.optimizer, state.params, rate_of(setup, state.step))
    for p in state.params.values():
        p.grad = None
    state.step += 1
    state.position += first
    update_ema(setup, state)
    sizes = torch.tensor([b.latents[0].numel() for b in micro for _ in b.names], device=setup.device)
    losses = torch.cat(losses)
    return Step(
        loss=(losses * sizes).sum() / elements,
        grad_norm=norm,
        losses=losses,
        sigmas=torch.cat(sigmas),
        names=[name for batch in micro for name in batch.names],
        tokens=sum(tokens_of(setup, batch) * len(batch.names) for batch in micro),
        flops=sum(train_flops(setup.cfg, tokens_of(setup, b), setup.text_length) * len(b.names) for b in micro),
    )


def tokens_of(setup: Setup, batch: Batch) -> int:
    """Tokens of one sample after patchify."""
    return math.prod(batch.latents.shape[2:]) // math.prod(setup.cfg.patch_size)


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
    """A step over all processes, equal on all of them. `signals`: by how many processes each was received."""

    loss: float
    grad_norm: float
    loss_by_sigma: list[float | None]
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
    mesh, weight = setup.mesh, float(step.tokens)
    sums, counts = sigma_sums(step.losses.cpu(), step.sigmas.cpu())
    loss, norm = float(step.loss), float(step.grad_norm)  # the device has done the step by now
    places, at = [0.0] * (3 * mesh.world), 3 * mesh.index(*mesh.sizes)
    peak = devices.memory_stats(setup.device)["peak_bytes"]
    places[at : at + 3] = waited, time.perf_counter() - since, peak
    out = iter(summed([loss * weight, weight, *sums, *counts, *signals.values(), *places], mesh))
    take = lambda n: [next(out) for _ in range(n)]  # noqa: E731
    total, weights = take(2)
    means = [s / n if n else None for s, n in zip(take(SIGMA_BINS), take(SIGMA_BINS), strict=True)]
    heard = {number: int(n) for number, n in zip(signals, take(len(signals)), strict=True)}
    return Figures(total / weights, norm, means, [Reading(*take(3)) for _ in range(mesh.world)], heard)


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
        "loss_by_sigma": figures.loss_by_sigma,
        "seconds": seconds,
        "data_seconds": max(data),
        "tokens_per_second": step.tokens * mesh.size(*DATA) / seconds,
        "mfu": None if peak is None else step.flops * mesh.size(*DATA) / seconds / peak / mesh.world,
        "peak_memory_bytes": int(max(r.peak for r in figures.readings)),
    }
    if mesh.world > 1:
        row |= {"data_rank": slowest(data), "straggler_rank": slowest(busy), "straggler_seconds": max(busy) - min(busy)}
    if setup.recipe.callbacks.grad_clip.log_grad_norms:
        row["grad_norm"] = figures.grad_norm
    return row


def check_finite(setup: Setup, step: Step, figures: Figures, number: int, last: Path | None) -> None:
    """Stops the run at a loss or gradient norm that is not finite, on all processes; nothing is saved after it."""
    if math.isfinite(figures.loss) and math.isfinite(figures.grad_norm):
        return
    own = [[name, math.isfinite(x)] for name, x in zip(step.names, step.losses.tolist(), strict=True)]
    # Processes that share samples name them alike.
    samples = {name: finite for part in gathered(own, setup.mesh) for name, finite in part}
    bad = [name for name, finite in samples.items() if not finite]
    kept = "no checkpoint was saved yet" if last is None else f"the last good checkpoint is {last}"
    raise UserError(
        f"step {number}: loss is {figures.loss}, gradient norm {figures.grad_norm}; samples of this step: "
        f"{', '.join(samples)}" + (f"; not finite: {', '.join(bad)}" if bad else "") + f"; {kept}"
    )
