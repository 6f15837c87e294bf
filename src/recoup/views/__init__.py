"""Other ways to look at a schedule, derived on request: Checkmate's matrices and Algorithm 1's statements."""

from recoup.views.algorithm1 import Compute, Deallocate, statements
from recoup.views.stage_matrices import Matrices, matrices, minimal_recomputation, schedule_of

__all__ = [
    "Compute",
    "Deallocate",
    "Matrices",
    "matrices",
    "minimal_recomputation",
    "schedule_of",
    "statements",
]
