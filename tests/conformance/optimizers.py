"""Optax's optimizers as rows of the conformance table.

Each row is a function of a learning rate (a number or a schedule) and of one more constant `c`, the
optimizer's own, with the value of `c` to differentiate at. A new optimizer is one new row.

Where an optimizer is differentiable only almost everywhere (signs, maxima), a start away from the
kinks is enough. Those that are not differentiable at all stand in `NOT_DIFFERENTIABLE` with the
reason, which the tests check to be still true.
"""

from collections.abc import Callable
from typing import NamedTuple

import optax
from optax import contrib


class Row(NamedTuple):
    make: Callable[..., optax.GradientTransformation]
    c: float
    lr: float = 0.05
    schedules: bool = True  # whether the learning rate may be a schedule
    signs: bool = False  # only signs of gradients count: no derivative passes through the loss


ALIASES = {
    "adabelief": Row(lambda lr, c: optax.adabelief(lr, b1=c, eps_root=1e-8), 0.8),
    "adadelta": Row(lambda lr, c: optax.adadelta(lr, rho=c, eps=1e-3), 0.8, lr=1.0),
    "adafactor": Row(
        lambda lr, c: optax.adafactor(lr, weight_decay_rate=c, min_dim_size_to_factor=2), 0.1
    ),
    "adagrad": Row(lambda lr, c: optax.adagrad(lr, eps=c), 0.1),
    "adam": Row(lambda lr, c: optax.adam(lr, b1=c, eps_root=1e-8), 0.8),
    "adamax": Row(lambda lr, c: optax.adamax(lr, b2=c), 0.9),
    "adamaxw": Row(lambda lr, c: optax.adamaxw(lr, weight_decay=c), 0.1),
    "adamw": Row(lambda lr, c: optax.adamw(lr, weight_decay=c, eps_root=1e-8), 0.1),
    "adan": Row(lambda lr, c: optax.adan(lr, b1=c, eps_root=1e-8), 0.9),
    "amsgrad": Row(lambda lr, c: optax.amsgrad(lr, b1=c, eps_root=1e-8), 0.8),
    "fromage": Row(
        lambda lr, c: optax.chain(optax.fromage(lr), optax.scale(c)), 0.9, schedules=False
    ),
    "lamb": Row(lambda lr, c: optax.lamb(lr, weight_decay=c, eps_root=1e-8), 0.1),
    "lars": Row(lambda lr, c: optax.lars(lr, momentum=c, trust_coefficient=0.1), 0.9, lr=0.5),
    "lbfgs": Row(
        lambda lr, c: optax.chain(
            optax.lbfgs(lr, memory_size=3, scale_init_precond=False, linesearch=None),
            optax.scale(c),
        ),
        0.9,
    ),
    "lion": Row(lambda lr, c: optax.lion(lr, weight_decay=c), 0.1, signs=True),
    "nadam": Row(lambda lr, c: optax.nadam(lr, b1=c, eps_root=1e-8), 0.8),
    "nadamw": Row(lambda lr, c: optax.nadamw(lr, weight_decay=c, eps_root=1e-8), 0.1),
    "noisy_sgd": Row(lambda lr, c: optax.noisy_sgd(lr, eta=c, key=0), 0.02),
    "novograd": Row(lambda lr, c: optax.novograd(lr, b1=c, eps_root=1e-8), 0.8),
    "optimistic_adam_v2": Row(
        lambda lr, c: optax.optimistic_adam_v2(lr, alpha=c, eps_root=1e-8), 0.5
    ),
    "optimistic_gradient_descent": Row(
        lambda lr, c: optax.optimistic_gradient_descent(lr, alpha=c), 0.5
    ),
    "optimistic_adam": Row(
        lambda lr, c: optax.optimistic_adam(lr, optimism=c, eps_root=1e-8), 0.04, schedules=False
    ),
    "polyak_sgd": Row(
        lambda lr, c: optax.polyak_sgd(max_learning_rate=1e4, scaling=lr, f_min=c), 0.2, lr=20.0
    ),
    "rprop": Row(lambda lr, c: optax.rprop(lr, eta_plus=c), 1.3, schedules=False, signs=True),
    "rmsprop": Row(lambda lr, c: optax.rmsprop(lr, decay=c, eps=1e-4), 0.8),
    "sgd": Row(lambda lr, c: optax.sgd(lr, momentum=c, nesterov=True), 0.9),
    "sign_sgd": Row(lambda lr, c: optax.chain(optax.sign_sgd(lr), optax.scale(c)), 0.7, signs=True),
    "signum": Row(lambda lr, c: optax.chain(optax.signum(lr), optax.scale(c)), 0.7, signs=True),
    "sm3": Row(lambda lr, c: optax.sm3(lr, momentum=c), 0.8, schedules=False),
    "yogi": Row(lambda lr, c: optax.yogi(lr, b1=c), 0.8),
}

TRANSFORMATIONS = {
    "clip_by_global_norm": Row(
        lambda lr, c: optax.chain(optax.clip_by_global_norm(c), optax.sgd(lr)), 0.1
    ),
    "adaptive_grad_clip": Row(
        lambda lr, c: optax.chain(optax.adaptive_grad_clip(c), optax.sgd(lr)), 0.05
    ),
    "clip": Row(lambda lr, c: optax.chain(optax.clip(c), optax.sgd(lr)), 0.1),
    "add_decayed_weights": Row(
        lambda lr, c: optax.chain(optax.add_decayed_weights(c), optax.sgd(lr)), 0.1
    ),
    "apply_every": Row(lambda lr, c: optax.chain(optax.sgd(lr, c), optax.apply_every(2)), 0.9),
}


def sam(lr, c, **options):
    ascent = optax.chain(contrib.normalize(), optax.sgd(c))
    return contrib.sam(optax.sgd(lr), ascent, **options)


OTHERS = TRANSFORMATIONS | {
    "acprop": Row(lambda lr, c: contrib.acprop(lr, b1=c), 0.8),
    "ademamix": Row(lambda lr, c: contrib.ademamix(lr, b1=c, eps_root=1e-8), 0.8),
    "dowg": Row(lambda lr, c: contrib.dowg(lr, weight_decay=c), 0.1, lr=1.0, schedules=False),
    "madgrad": Row(lambda lr, c: contrib.madgrad(lr, momentum=c), 0.9),
    "momo": Row(lambda lr, c: contrib.momo(lr, weight_decay=c), 0.1),
    "momo_adam": Row(lambda lr, c: contrib.momo_adam(lr, b1=c), 0.8),
    "muon": Row(lambda lr, c: contrib.muon(lr, beta=c), 0.9),
    "prodigy": Row(lambda lr, c: contrib.prodigy(lr, estim_lr0=c), 1e-2, lr=1.0, schedules=False),
    "reduce_on_plateau": Row(
        lambda lr, c: optax.chain(optax.sgd(lr, c), contrib.reduce_on_plateau(0.5, 1)), 0.5
    ),
    "sam": Row(sam, 0.1),
    "schedule_free_sgd": Row(
        lambda lr, c: contrib.schedule_free_sgd(lr, b1=c), 0.9, schedules=False
    ),
    "schedule_free_adamw": Row(
        lambda lr, c: contrib.schedule_free_adamw(lr, weight_decay=c), 0.1, schedules=False
    ),
    "simplified_ademamix": Row(lambda lr, c: contrib.simplified_ademamix(lr, alpha=c), 0.5),
}


class Unfit(NamedTuple):
    row: Row
    right: str | None  # the engine that is right all the same
    why: str


ROOT_OF_START = (
    "It takes the square root of an accumulator that starts at 0: NaN in forward mode, where the "
    "start has a tangent. Reverse mode is right unless a gradient is exactly 0 later."
)
NOT_DIFFERENTIABLE = {
    "radam": Unfit(
        Row(lambda lr, c: optax.chain(optax.radam(lr, eps_root=1e-8), optax.scale(c)), 0.8),
        "forward",
        "Its rectification takes the square root of a negative number at step 3, in the branch "
        "that `jnp.where` drops: NaN in reverse mode.",
    ),
    "lbfgs with its line search": Unfit(
        Row(lambda lr, c: optax.chain(optax.lbfgs(), optax.scale(lr * c)), 1.0),
        "forward",
        "The line search is a loop of unknown length, which has no reverse mode. (Without it, "
        "`scale_init_precond=True` hides a term of the first step under `stop_gradient`.)",
    ),
    "adopt": Unfit(Row(lambda lr, c: contrib.adopt(lr, b1=c), 0.8), "reverse", ROOT_OF_START),
    "dadapt_adamw": Unfit(
        Row(lambda lr, c: contrib.dadapt_adamw(lr, estim_lr0=c), 1e-2, lr=1.0),
        "reverse",
        ROOT_OF_START,
    ),
    "dog": Unfit(
        Row(lambda lr, c: contrib.dog(lr, ("distance", c)), 0.05), "reverse", ROOT_OF_START
    ),
    "mechanize": Unfit(
        Row(lambda lr, c: contrib.mechanize(optax.sgd(lr), weight_decay=0.0, s_init=c), 0.1),
        None,
        "It takes the square root of accumulated products that start at 0.",
    ),
}
"""Optimizers that one or both engines cannot differentiate. Besides these, `contrib.sophia` and
`contrib.dpsgd` ask for what a plain training step does not compute (a Hessian estimate from its own
function, gradients by example), `contrib.galore` for singular vectors, which have no derivative
where singular values coincide, and `contrib.cocob` takes the larger of two numbers that start equal."""
