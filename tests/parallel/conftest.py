"""One pool of processes for the folder; its tests stay on one xdist worker."""

from pathlib import Path

import pytest

from tests.parallel.launched import Launched
from tests.parallel.pool import Pool

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items):
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.xdist_group("parallel"))


@pytest.fixture(scope="session")
def pool():
    pool = Pool()
    yield pool
    pool.stop()


@pytest.fixture
def launched(tmp_path):
    """`launched(fn, *args, size=2)` starts processes, see `Launched`, which end with the test at the latest."""
    started = []

    def launch(fn, *args, size=2):
        started.append(Launched(tmp_path / f"processes-{len(started)}", fn, *args, size=size))
        return started[-1]

    yield launch
    for processes in started:
        processes.kill()
