"""foretune: exact hypergradients of any training procedure, in JAX."""

from ._check import HypergradientCheck as HypergradientCheck
from ._check import HypergradientMismatch as HypergradientMismatch
from ._check import check_hypergradient as check_hypergradient
from ._dynamics import Dynamics as Dynamics
from ._dynamics import Training as Training
from ._dynamics import TrainState as TrainState
from ._engines.base import Hypergradient as Hypergradient
from ._engines.forward import Forward as Forward
from ._engines.nonfinite import NonFiniteError as NonFiniteError
from ._engines.reverse import Reverse as Reverse
from ._problem import FullBatch as FullBatch
from ._problem import Minibatches as Minibatches
from ._problem import Problem as Problem

__version__ = "0.1.0"
