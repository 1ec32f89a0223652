"""One pool of processes for the folder; its tests stay on one xdist worker."""

from pathlib import Path

import pytest

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
