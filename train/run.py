"""One training run from a recipe, top to bottom, on one process or several. The first process writes and prints."""

import contextlib
import dataclasses
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch

from core import compat, keys
from core.config import save_config
from core.errors import UserError
from core.trees import num_bytes, num_params
from infer.jobs import Job
from parallel.checkpoint import Writer
from parallel.launch import World, agreed
from train import metrics
from train import state as states
from train.config import Recipe
from train.data import batches
from train.layout import collective_timeout, data_share
from train.plot import loss_plot
from train.setup import Setup, blank_state, initial_state, prepare
from train.signals import heard_by, stop_requests, stopping
from train.state import TrainState
from train.step import check_finite, figures_of, rate_of, train_row, train_step
from train.validate import Interrupted, check_prompts, validate


@contextlib.contextmanager
def resource_faults(setup: Setup) -> Iterator[None]:
    """Turns a full disk into a UserError, and too little memory into one that says what the state takes."""
    folder, mesh = Path(setup.recipe.training.checkpoint.output_dir), setup.mesh
    compat.record_memory(setup.device)
    try:
        yield
    except torch.OutOfMemoryError as error:
        name = "memory_snapshot" if mesh.world == 1 else f"memory_snapshot_rank_{mesh.rank}"
        path = compat.dump_memory(setup.device, folder / f"{name}.pickle")
        state = blank_state(setup, "meta")
        ema = {} if state.ema is None else state.ema
        held = sum(map(num_bytes, (state.params, state.trained, state.optimizer, ema)))
        held /= mesh.size("dp_shard", "sp", "tp")
        raise UserError(
            f"out of memory: weights, gradients, moments and EMA take {held / 2**30:.1f} GiB"
            f"{'' if mesh.world == 1 else ' of each process'}, "
            "the rest are activations. Lower training.data.train_batch_size, set training.model."
            "enable_gradient_checkpointing_type: full, or with enable_torch_compile lower activation_memory_budget. "
            f"Snapshot for pytorch.org/memory_viz: {path}. ({str(error).splitlines()[0]})"
        ) from None
    except OSError as error:
        raise UserError(f"{folder}: {error}; complete checkpoints are untouched") from error


@contextlib.contextmanager
def traces(setup: Setup, log: Callable[[str], None]) -> Iterator[Callable[[int], contextlib.AbstractContextManager]]:
    """Yields `traced(step)`, to wrap each optimiser step (0-based) in: those that the recipe names are traced.

    `trace.json` is written after the last of them, or when the run ends before it.
    """
    want, active = setup.recipe.training.profile if setup.mesh.leader else None, []
    path = Path(setup.recipe.training.checkpoint.output_dir) / "trace.json"

    def finish() -> None:
        if active:
            profile = active.pop()
            profile.stop()
            profile.export_chrome_trace(str(path))
            log(f"trace: {path}")

    @contextlib.contextmanager
    def traced(step: int) -> Iterator[None]:
        if want is not None and step == want.start:
            active.append(torch.profiler.profile())
            active[0].start()
        yield
        if want is not None and step + 1 >= want.start + want.steps:
            finish()

    try:
        yield traced
    finally:
        finish()


def opened_checkpoint(setup: Setup) -> states.Opened | None:
    """The checkpoint that the recipe asks for, judged against a state without memory: nothing is allocated or read."""
    asked = setup.recipe.training.checkpoint
    if asked.resume_from_checkpoint is None:
        return None
    folder = states.find(asked.output_dir, asked.resume_from_checkpoint)
    return states.open_for(blank_state(setup, "meta"), folder, setup.record(), weights_only=asked.weights_only)


def starting_state(setup: Setup, opened: states.Opened | None, log: Callable[[str], None]) -> TrainState:
    """A fresh state, or that of a checkpoint."""
    if opened is None:
        return initial_state(setup)
    state = blank_state(setup, setup.device)
    states.fill(state, opened)
    if setup.recipe.training.checkpoint.weights_only:
        state.step = opened.record["step"]
        state.position = state.step * setup.recipe.training.loop.gradient_accumulation_steps * setup.microbatch
    if again := state.position % setup.microbatch:
        state.position -= again
        log(f"note: batches of another size: the last {again} of {state.position + again} samples are drawn again")
    threads, now = opened.record["threads"], torch.get_num_threads()
    if threads != now and setup.device.type == "cpu":
        log(f"note: made with {threads} threads, now {now}: losses agree, but not to the last bit")
    log(f"resumed from {opened.folder} at step {state.step}")
    return state


def train(recipe: Recipe, world: World | None = None) -> metrics.Summary:
    """Runs a recipe to its last step, or to a checkpoint when asked to stop.

    Collective over the processes of `world`; None: a process alone. A signal to any of them stops all after the same
    step.

    Raises:
        UserError: bad input before anything is written; later a loss that is not finite, a full disk or
            too little memory. Checkpoints that were complete stay.
    """
    started = time.perf_counter()
    setup = prepare(recipe, world)
    leads = setup.mesh.leader
    log: Callable[[str], None] = print if leads else lambda text: None
    opened = opened_checkpoint(setup)
    jobs = check_prompts(setup)
    if recipe.training.deterministic:
        compat.deterministic()
    out = Path(recipe.training.checkpoint.output_dir)
    with stop_requests(alone=setup.mesh.world == 1) as received, resource_faults(setup):
        state = starting_state(setup, opened, log)
        if leads:
            out.mkdir(parents=True, exist_ok=True)
            save_config(recipe, out / "config.yaml")
            metrics.drop_after(out / "metrics.jsonl", state.step)
            write_setup_row(setup, state, out, time.perf_counter() - started)
        stopped = run_steps(setup, state, jobs, None if opened is None else opened.folder, out, received)
    summary = agreed(lambda: dataclasses.asdict(metrics.summary(metrics.read_rows(out / "metrics.jsonl"))), setup.mesh)
    summary = metrics.Summary(**summary)
    log(metrics.summary_text(summary))
    if stopped:
        raise SystemExit(128 + stopped[0])
    return summary


def write_setup_row(setup: Setup, state: TrainState, out: Path, seconds: float) -> None:
    """The first row of a run, and the same on the terminal."""
    training, mesh = setup.recipe.training, setup.mesh
    batch = setup.microbatch * training.loop.gradient_accumulation_steps
    dtype, size = str(setup.compute).removeprefix("torch."), num_params(state.params)
    for remark in setup.family.remarks(setup.recipe, setup.dataset, setup.components.text):
        print(f"note: {remark}")
    many = "" if mesh.world == 1 else f" of {mesh.world} processes ({axes_text(mesh.sizes)})"
    print(
        f"{f'{size / 1e6:,.1f} M' if size >= 1e5 else size} parameters on {setup.device}{many} in {dtype}, "
        f"{len(setup.dataset)} samples, effective batch {batch}, output {out}",
        flush=True,
    )
    metrics.append_row(
        out / "metrics.jsonl",
        "setup",
        seconds=seconds,
        effective_batch=batch,
        parameters=num_params(state.params),
        trained_parameters=num_params(state.trained),
        samples=len(setup.dataset),
        device=str(setup.device),
        compute_dtype=str(setup.compute),
        torch=str(torch.__version__),
        mesh=dict(mesh.sizes),
    )


def axes_text(sizes: Mapping[str, int]) -> str:
    """`"dp_shard 4 x tp 2"`: the axes of a mesh that are larger than 1."""
    return " x ".join(f"{name} {n}" for name, n in sizes.items() if n > 1)


def run_steps(setup, state, jobs: list[Job], last: Path | None, out: Path, received: list[int]) -> list[int]:
    """The loop: ends after the last step, or after the step during which a signal came; always saves its end.

    Saving comes before validation, which may take long and which a resuming run makes up for. Returns the signals.
    """
    recipe, total = setup.recipe, setup.recipe.training.loop.max_train_steps
    accumulation, mesh = recipe.training.loop.gradient_accumulation_steps, setup.mesh
    with contextlib.ExitStack() as stack:
        display = stack.enter_context(metrics.progress(total, state.step) if mesh.leader else metrics.silent())
        traced = stack.enter_context(traces(setup, display.log))
        data = stack.enter_context(stream(setup, state))
        writer = stack.enter_context(make_writer(setup))
        stop, since = stopping(received, setup.mesh), time.perf_counter()
        while not stop:
            if jobs and validation_owed(setup, state, out):
                with contextlib.suppress(Interrupted):
                    timed(setup, out, "validate", state, lambda: validate(setup, state, jobs, display.log, received))
                plot(setup, out)
                stop, since = stopping(received, setup.mesh), time.perf_counter()
            if stop or state.step >= total:
                break
            start, lr = time.perf_counter(), rate_of(setup, state.step)
            with traced(state.step):
                micro = [next(data) for _ in range(accumulation)]
                waited = time.perf_counter() - start
                step = train_step(setup, state, micro)
            figures = figures_of(setup, step, waited, since, heard_by(received))
            since = time.perf_counter()
            check_finite(setup, step, figures, state.step, last)
            row = train_row(setup, step, figures, lr, state.step, since - start)
            display.update(note(setup, out, "train", **row))
            stop = [number for number, n in figures.signals.items() if n]
            if due(recipe.training.checkpoint.training_state_checkpointing_steps, state.step) or state.step == total:
                last, since = save_now(setup, state, out, last, display.log, writer), time.perf_counter()
        writer.wait()
        if agreed(lambda: not states.folder_of(out, state.step).is_dir(), mesh):
            save_now(setup, state, out, last, display.log, writer)
            writer.wait()
        plot(setup, out)
        if stop:
            display.log(f"stopped by {signal.Signals(stop[0]).name} after step {state.step}; continue with "
                        "--training.checkpoint.resume_from_checkpoint latest")  # fmt: skip
    return stop


def make_writer(setup: Setup) -> Writer:
    """What writes the checkpoints of the run's processes. Collective over the mesh."""
    background = setup.recipe.training.checkpoint.save_in_background
    return Writer(setup.mesh, background=background, timeout=collective_timeout(setup.recipe))


def note(setup: Setup, out: Path, phase: str, **values) -> dict:
    """A row of metrics, which the first process writes."""
    return metrics.append_row(out / "metrics.jsonl", phase, **values) if setup.mesh.leader else values


def plot(setup: Setup, out: Path) -> None:
    """Draws the loss curve, on the first process."""
    if setup.mesh.leader:
        loss_plot(metrics.read_rows(out / "metrics.jsonl"), out / "loss.png", title=out.name)


def stream(setup: Setup, state: TrainState) -> contextlib.closing:
    """This process's shares of microbatches from the state's data position on; closing it ends its worker processes."""
    return contextlib.closing(
        batches(
            setup.dataset,
            key=keys.fold_in(state.key, "data"),
            batch_size=setup.microbatch,
            start=state.position // setup.microbatch,
            num_workers=setup.recipe.training.data.dataloader_num_workers,
            share=data_share(setup.mesh),
        )
    )


def validation_owed(setup: Setup, state: TrainState, out: Path) -> bool:
    """Whether a validation is due at this step and metrics.jsonl has none (a run may have been stopped before it)."""
    v, step = setup.recipe.callbacks.validation, state.step
    last = setup.recipe.training.loop.max_train_steps
    if not (v.validate_at_start if step == 0 else due(v.every_steps, step) or step >= last):
        return False
    done = lambda row: row["phase"] == "validate" and row["step"] == step  # noqa: E731
    return agreed(lambda: not any(map(done, metrics.read_rows(out / "metrics.jsonl"))), setup.mesh)


def due(every: int, step: int) -> bool:
    """True after every `every` steps; 0 means never."""
    return every > 0 and step % every == 0


def save_now(setup: Setup, state: TrainState, out: Path, last: Path | None, log, writer: Writer) -> Path | None:
    """Saves a checkpoint and notes it; weights that are not finite are refused, with the `last` good checkpoint.

    Returns the newest checkpoint that is there: in the background the one before, until the next.
    """
    states.check_weights(state, last, setup.mesh)
    keep = setup.recipe.training.checkpoint.checkpoints_total_limit
    work = lambda: states.save(out, state, setup.record(), keep=keep, writer=writer)  # noqa: E731
    path = timed(setup, out, "save", state, work)
    log(f"{'saving' if writer.background else 'saved'} {path}")
    return path if writer.last is None else writer.last


def timed(setup: Setup, out: Path, phase: str, state: TrainState, work):
    """Runs `work` and writes a metrics row of its phase."""
    start = time.perf_counter()
    result = work()
    note(setup, out, phase, step=state.step, seconds=time.perf_counter() - start)
    return result
