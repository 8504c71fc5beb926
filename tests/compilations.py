"""How many programs of a name are compiled."""

import contextlib

import jax


@contextlib.contextmanager
def compilations(*names):
    """Yield a list, to which the names of these programs are added when they are compiled."""
    seen = []

    def listen(event, duration, fun_name="", **_):
        if "backend_compile" in event and fun_name in [f"jit({name})" for name in names]:
            seen.append(fun_name)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield seen
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
