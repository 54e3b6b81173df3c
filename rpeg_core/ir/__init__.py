"""The graph of one RL step: values, builder, well-formedness, text and JSON forms."""

from rpeg_core.ir.builder import RpegBuilder, weights_name
from rpeg_core.ir.graph import (
    Container,
    ContainerKind,
    DataEdge,
    Model,
    Operator,
    PublicationEdge,
    Role,
    Rpeg,
    Training,
)
from rpeg_core.ir.serialize import from_dict, to_dict
from rpeg_core.ir.text import from_text, to_text
from rpeg_core.ir.view import data_order, to_networkx, training_operator
from rpeg_core.ir.wellformed import require_well_formed, violations

__all__ = [
    "Container",
    "ContainerKind",
    "DataEdge",
    "Model",
    "Operator",
    "PublicationEdge",
    "Role",
    "Rpeg",
    "RpegBuilder",
    "Training",
    "data_order",
    "from_dict",
    "from_text",
    "require_well_formed",
    "to_dict",
    "to_networkx",
    "to_text",
    "training_operator",
    "violations",
    "weights_name",
]
