"""foretune: exact hypergradients of any training procedure, in JAX."""

from ._bias import Bias as Bias
from ._bias import BiasReport as BiasReport
from ._bias import hypergradient_bias as hypergradient_bias
from ._callbacks import Callback as Callback
from ._callbacks import History as History
from ._callbacks import Progress as Progress
from ._callbacks import TensorBoard as TensorBoard
from ._check import HypergradientCheck as HypergradientCheck
from ._check import HypergradientMismatch as HypergradientMismatch
from ._check import check_hypergradient as check_hypergradient
from ._checkpoint import Checkpoint as Checkpoint
from ._constraints import AbstractConstraint as AbstractConstraint
from ._constraints import Box as Box
from ._constraints import CappedSimplex as CappedSimplex
from ._constraints import Intersection as Intersection
from ._constraints import L1Ball as L1Ball
from ._constraints import L2Ball as L2Ball
from ._constraints import Log as Log
from ._constraints import Logit as Logit
from ._constraints import NonNegative as NonNegative
from ._constraints import Simplex as Simplex
from ._constraints import Symmetric as Symmetric
from ._constraints import SymmetricNonNegative as SymmetricNonNegative
from ._driver import Result as Result
from ._driver import Run as Run
from ._dynamics import Dynamics as Dynamics
from ._dynamics import Training as Training
from ._dynamics import TrainState as TrainState
from ._engines.base import Hypergradient as Hypergradient
from ._engines.forward import Forward as Forward
from ._engines.nonfinite import NonFiniteError as NonFiniteError
from ._engines.reverse import Reverse as Reverse
from ._minimize import minimize as minimize
from ._problem import FullBatch as FullBatch
from ._problem import Minibatches as Minibatches
from ._problem import Problem as Problem
from ._realtime import RealTime as RealTime
from ._realtime import RealTimeState as RealTimeState
from ._relative import relative_adam as relative_adam
from ._stopping import NoImprovement as NoImprovement
from ._stopping import SmallGradient as SmallGradient
from ._stopping import TimeLimit as TimeLimit
from ._stopping import Vanished as Vanished
from ._stream import windows as windows

__version__ = "0.1.0"
