"""A node's host memory, if the trainings of a plan kept their optimizer's state there instead of on the GPUs.

RPEG's plans keep it on the GPUs; frameworks that a plan is handed to can move it (ZeRO-Offload, Megatron-LM's
``--optimizer-cpu-offload``). What a term of training state takes of the host is :attr:`CostTerm.host
<rpeg_core.records.CostTerm.host>`: more than it frees, because the update on the host needs the gradients there.
"""

from __future__ import annotations

import attrs

from rpeg_core.costing.book import CostBook
from rpeg_core.ir import Role, Rpeg
from rpeg_core.planning.assignment import ExecutionPlan
from rpeg_core.spec.machine import Allocation, DeviceSpace

__all__ = ["HostMemory", "HostState", "host_memory"]


@attrs.frozen(kw_only=True)
class HostState:
    """The state of one training: bytes that each of its GPUs would be rid of, and its process would hold instead."""

    operator: str
    freed_bytes: float
    process_bytes: float


@attrs.frozen(kw_only=True)
class HostMemory:
    """All trainings together; ``node_bytes`` is of the node that would hold most."""

    states: tuple[HostState, ...]
    node_bytes: float


def host_memory(rpeg: Rpeg, plan: ExecutionPlan, book: CostBook) -> HostMemory:
    """What the plan's trainings would take of their nodes' host memory; no states when no term says.

    Raises:
        CostTermError: a cost term fails.
    """
    states, nodes = [], [0.0] * (book.machine.gpus // book.machine.gpus_per_node)
    for operator in rpeg.operators:
        if operator.role is not Role.TRAINING:
            continue
        row = book.row(plan[operator.name], operator.name)
        process = float(book.host_bytes(rpeg, operator)[row])
        if process > 0:
            freed = float(book.operators[operator.name].training_state[row])
            states.append(HostState(operator=operator.name, freed_bytes=freed, process_bytes=process))
        for node in range(len(nodes)):
            here = plan[operator.name].allocation.overlap(_gpus(book.machine, node))
            nodes[node] = nodes[node] + here * process
    return HostMemory(states=tuple(states), node_bytes=max(nodes))


def _gpus(machine: DeviceSpace, node: int) -> Allocation:
    return Allocation(node * machine.gpus_per_node, (node + 1) * machine.gpus_per_node)
