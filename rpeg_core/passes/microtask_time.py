"""The length of a schedule of microtasks (numba): thousands of layouts, each with thousands of microtasks."""

from __future__ import annotations

import numba
import numpy as np

__all__ = ["lengths"]


@numba.njit(cache=True)
def lengths(pipeline, microbatches, forward_s, backward_s):
    """See :func:`rpeg_core.passes.microtasks.interleaved_s`."""
    models = forward_s.shape[0]
    found = np.zeros(len(pipeline))
    for layout in range(len(pipeline)):
        stages, count = pipeline[layout], models * microbatches[layout]
        forward, backward = np.full((stages, count), -1.0), np.full((stages, count), -1.0)  # ends; not yet done
        done, free = np.zeros(stages, np.int64), np.zeros(stages)
        left = stages * 2 * count
        while left > 0:
            for stage in range(stages):
                last = stage == stages - 1
                ahead = min(stages - 1 - stage, count)
                while done[stage] < 2 * count:
                    place = done[stage] - ahead
                    back = place >= 0 and (place % 2 == 1 or place >= 2 * (count - ahead))
                    if place < 0:
                        i = done[stage]
                    elif place < 2 * (count - ahead):
                        i = place // 2 if back else ahead + place // 2
                    else:
                        i = place - (count - ahead)
                    ready = 0.0
                    if back and not last:
                        ready = backward[stage + 1, i]
                    elif not back and stage > 0:
                        ready = forward[stage - 1, i]
                    if ready < 0.0:
                        break  # its input is not there yet
                    seconds = backward_s if back else forward_s
                    free[stage] = max(free[stage], ready) + seconds[i % models, 1 if last else 0, layout]
                    if back:
                        backward[stage, i] = free[stage]
                    else:
                        forward[stage, i] = free[stage]
                    done[stage] += 1
                    left -= 1
        found[layout] = np.max(free)
    return found
