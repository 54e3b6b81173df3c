"""Upper bounds on tokens/s over all plans: how far from the best a plan can be at most, under the model.

``tables`` and ``state`` describe sets of plans (boxes), ``template`` and ``relaxation`` bound one box, ``tree``
splits boxes until the bound is tight, ``certificate`` is what reports use. Importing this package imports numba.
"""

from rpeg_core.planning.bounds.certificate import DEFAULT_BOXES, Bound, can_split, gap, problem_bound, upper_bound
from rpeg_core.planning.bounds.tables import BOUNDS_FINGERPRINT

__all__ = ["BOUNDS_FINGERPRINT", "DEFAULT_BOXES", "Bound", "can_split", "gap", "problem_bound", "upper_bound"]
