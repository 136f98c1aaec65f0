"""A second process finds what the first one compiled, on every route."""

import pytest

from tests.processes import model
from tests.processes.start import finish, start

# These partition by custom_partitioning, whose key in JAX's cache has addresses of this process.
WITH_POINTERS = ("auto", "mixed", "partly manual")
OPTION = "JAX_REMOVE_CUSTOM_PARTITIONING_PTR_FROM_CACHE_KEY"


def twice(folder, *routes, **environment):
    """Hits and misses of a first process, and of a second one."""
    settings = {
        "JAX_COMPILATION_CACHE_DIR": str(folder),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "0",
        **environment,
    }
    return [finish(start("caching", *routes, **settings))[0] for _ in range(2)]


@pytest.mark.parametrize("option", ["0", "1"])
def test_second_process_compiles_nothing(tmp_path, option):
    """With the option on every route; without it where nothing is partitioned by a callback."""
    cold, warm = twice(tmp_path, *model.TYPES, **{OPTION: option})
    for route in model.TYPES:
        assert cold[route]["misses"] > 0, cold
        found = option == "1" or route not in WITH_POINTERS
        assert (warm[route]["misses"] == 0) is found, f"{route}: {warm}"
        assert (warm[route]["hits"] > 0) is found, f"{route}: {warm}"
