"""PyTorch models in foretune, through torchax: `pip install "foretune[torch]"`.

`bridge(module)` gives a `torch.nn.Module` as a pure JAX function of its parameters, so that every
engine and driver of foretune tunes its training, and writes the trained weights back into it.
"""

try:
    import torch  # pyright: ignore[reportMissingImports]  # noqa: F401
    import torchax  # pyright: ignore[reportMissingImports]  # noqa: F401
except (ImportError, AttributeError) as error:  # AttributeError: torchax and torch do not match
    raise ImportError(
        f"foretune.torch needs torch and torchax ({error}): pip install 'foretune[torch]'."
    ) from error

from ._bridge import Bridge as Bridge
from ._bridge import bridge as bridge

__all__ = ["Bridge", "bridge"]
