"""What every benchmark shares: versions, the table on the terminal, and the JSON that is kept."""

import json
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

COLUMNS = ["op", "shape", "ours", "unit", "peer", "peer_value", "ratio", "ceiling"]


def versions() -> dict[str, str]:
    """Python and the packages that decide the figures."""
    out = {"python": platform.python_version(), "cuda": str(torch.version.cuda)}
    for name in ("torch", "triton", "diffusers"):
        try:
            out[name] = version(name)
        except PackageNotFoundError:
            out[name] = "absent"
    return out


def device_name(device: torch.device) -> str:
    """The GPU's name, or the processor's architecture."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu ({platform.machine()})"


def row(op, shape, ours, unit, peer, peer_value, *, smaller_is_better, ceiling) -> dict:
    """One comparison; `ratio` > 1 means that ours is better."""
    ratio = None
    if ours is not None and peer_value is not None:
        ratio = peer_value / ours if smaller_is_better else ours / peer_value
    return dict(zip(COLUMNS, [op, shape, ours, unit, peer, peer_value, ratio, ceiling], strict=True))


def show(rows: list[dict]) -> None:
    """Prints the rows as a table."""
    table = Table(*COLUMNS)
    text = lambda v: "-" if v is None else f"{v:.4g}" if isinstance(v, float) else str(v)  # noqa: E731
    for r in rows:
        table.add_row(*[text(r[c]) for c in COLUMNS])
    Console(width=170).print(table)


def save(script: str, rows: list[dict], device: str, folder: Path | None = None, *, append: bool = False) -> None:
    """Writes `benchmarks/results/<script>.json`; `append` keeps rows of other shapes that are in it."""
    folder = Path(__file__).parent / "results" if folder is None else folder
    folder.mkdir(parents=True, exist_ok=True)
    path, shapes = folder / f"{Path(script).stem}.json", {r["shape"] for r in rows}
    kept = json.loads(path.read_text())["rows"] if append and path.is_file() else []
    rows = [*(r for r in kept if r["shape"] not in shapes), *rows]
    data = {"versions": versions(), "device": device, "rows": rows}
    path.write_text(json.dumps(data, indent=1) + "\n")
