"""Bad inputs to all of foretune, each with the error that a user is to see.

A row is (name, call, class, words ...): the call ends in an error of that class whose message holds
the words. For a class of warnings, the call warns so and returns.

`python -m tests.trials.bad_inputs` makes the calls as a user would, without the run-time type checks of
the tests: it reads the numbers of rows, one to a line, and writes what came of each as a line of JSON.
"""

import importlib
import json
import sys
import traceback
import warnings
from typing import Any, NamedTuple

import jax

AREAS = (
    *("hparams", "problem", "engines", "outer", "rehearse", "sets", "beside", "realtime"),
    *("attribution", "apps", "files", "commands"),
)


class Row(NamedTuple):
    """A bad input and what is to come of it."""

    name: str
    call: Any
    error: type
    words: tuple[str, ...]


def table() -> list[Row]:
    """Return all rows."""
    modules = [(area, importlib.import_module(f".bad_{area}", __package__)) for area in AREAS]
    return [
        Row(f"{area}: {name}", call, error, tuple(words))
        for area, module in modules
        for name, call, error, *words in module.ROWS
    ]


def outcome(row: Row) -> dict[str, Any]:
    """Make the call, and return what came of it."""
    programs = []

    def listen(event, duration, fun_name="", **_):
        if "backend_compile" in event and "compute" in fun_name:
            programs.append(fun_name)

    jax.monitoring.register_event_duration_secs_listener(listen)
    found: dict[str, Any] = {"classes": [], "message": "nothing happened", "raised": False}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            row.call()
        except Exception as error:
            found = {
                "classes": [kind.__name__ for kind in type(error).__mro__],
                "message": "\n".join([str(error), *getattr(error, "__notes__", [])]),
                "raised": True,
                "trace": "".join(traceback.format_exception(error)[-3:]),
            }
    jax.monitoring.unregister_event_duration_listener(listen)
    said = [
        {"classes": [kind.__name__ for kind in type(w.message).__mro__], "message": str(w.message)}
        for w in caught
    ]
    return found | {"warnings": said, "programs": len(programs)}


if __name__ == "__main__":
    rows, answers = table(), sys.stdout
    sys.stdout = sys.stderr  # where the calls may print
    for line in sys.stdin:
        print(json.dumps(outcome(rows[int(line)])), file=answers, flush=True)
