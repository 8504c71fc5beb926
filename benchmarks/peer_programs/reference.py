"""The hypergradient in float64, for the error of all others.

By JAX alone, as `jax_program`, with each step computed again on the way back so that it fits.
"""

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np

from . import jax_models, jax_program, problems


def main() -> None:
    request = json.loads(sys.argv[1])
    jax.config.update("jax_enable_x64", True)
    spec = problems.make(request["problem"], request["device"], request["quick"]).astype(np.float64)
    gradient = jax.jit(jax.grad(jax_program.response(spec, checkpoint=True)))
    exact = gradient(
        {name: jnp.asarray(h) for name, h in spec.hparams.items()},
        jax_models.parameters(spec),
        jax_models.examples(spec.data),
        None if spec.indices is None else jnp.asarray(spec.indices),
        jax_models.examples(spec.validation),
    )
    np.savez(request["exact"], **exact)


if __name__ == "__main__":
    main()
