"""Packages that only an extra installs: where one is missing, the error says which extra."""

import contextlib
from collections.abc import Iterator


@contextlib.contextmanager
def needs(extra: str, what: str) -> Iterator[None]:
    """Turn a package that is not there into a sentence that names the extra.

    >>> with needs("data", "reading tables"):
    ...     import no_such_package
    Traceback (most recent call last):
    ImportError: reading tables needs no_such_package: pip install 'foretune[data]'.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        name = (error.name or "a package").split(".")[0]
        raise ImportError(f"{what} needs {name}: pip install 'foretune[{extra}]'.") from error
