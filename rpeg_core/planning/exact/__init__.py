"""Branch and bound over all plans of a problem: the best one with a proof, or how far from it the best found can be.

``proof`` is the entry, ``forest`` the open sets of plans (``rpeg_core.planning.bounds``) of all structures, ``descent``
good plans early, ``account`` the budget. Importing this package imports numba.
"""

from rpeg_core.planning.exact.proof import EVALUATED_AT_ONCE, OPEN_BOXES, Proof, prove

__all__ = ["EVALUATED_AT_ONCE", "OPEN_BOXES", "Proof", "prove"]
