"""What all processes of a run have to do alike: the first one to ask decides."""

from jax._src import distributed  # private: there is no public way to the processes' shared store

_SECONDS = 60  # the store answers at once or is gone


def agreed(name: str, proposal: str) -> str | None:
    """The first proposal for a name that any process made; None where processes share no store.

    Nobody waits for another process: some may never ask.

    Raises: RuntimeError where the store, and with it the run, is gone.
    """
    client = distributed.global_state.client
    if client is None:
        return None
    try:
        client.key_value_set(name, proposal, allow_overwrite=False)
    except RuntimeError as error:
        if "ALREADY_EXISTS" not in str(error):
            raise
    return client.blocking_key_value_get(name, _SECONDS * 1000)
