"""Moving boxes of tensors between ranks: weights between any two layouts, and rows between data-parallel degrees.

A rank *holds* fragments, boxes of global tensors that have a name. A :class:`Route` says, for one rank, which pieces of
the fragments that it holds go where, and which pieces of the fragments that it wants come from whom. All ranks derive
it from the same geometry, so that nothing is negotiated when something is moved; only the two ends of a message take
part in it. Source and target ranks may be the same ones, others, or partly both: a rank that holds a piece copies it.

Messages. All pieces between two ranks travel in one message of bytes, or in several of at most ``bucket_bytes``, which
bounds the memory of the buffers; in each round every pair of ranks has at most one message under way.

Bytes. What a route *delivers* is counted once for each distinct piece, at the lowest target rank that wants it: summed
over the ranks, this is the payload of the container, however many replicas get it. ``wire_bytes`` is what really left
this rank for others.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import attrs
import torch
import torch.distributed
from torch import Tensor

from rpeg_core.errors import ExecutionError
from rpeg_plugin_megatron.shards import Fragment

__all__ = ["BUCKET_BYTES", "Cut", "Held", "Moved", "Route", "move", "route"]

BUCKET_BYTES = 256 * 2**20
"""Of one message between two ranks."""

_ALIGNMENT = 16
"""Of every piece in a message, so that its bytes can be viewed as any type."""


Held = Mapping[int, Sequence[Fragment]]
"""Global rank -> the fragments that it holds or wants; their order is that of the tensors given to :func:`move`."""


@attrs.frozen
class Cut:
    """A piece of this rank's tensor number ``item``; ``elements`` of it."""

    item: int
    slices: tuple[slice, ...]
    elements: int


@attrs.frozen(kw_only=True)
class Route:
    """One rank's part in moving boxes.

    Attributes:
        local: (from, to) on this rank.
        sends, receives: for every other rank in ascending order, the pieces in the order in which they travel.
        delivered: for each item that the rank wants, how many elements of it count as delivered here.
    """

    local: tuple[tuple[Cut, Cut], ...]
    sends: tuple[tuple[int, tuple[Cut, ...]], ...]
    receives: tuple[tuple[int, tuple[Cut, ...]], ...]
    delivered: tuple[int, ...]


@attrs.frozen
class Moved:
    """What a rank had of a move: unique elements delivered to it, and bytes that it sent to other ranks."""

    elements: int
    wire_bytes: int


def route(rank: int, held: Held, wanted: Held, *, largest: int = BUCKET_BYTES // 4) -> Route:
    """This rank's part in giving all ranks of ``wanted`` their boxes out of those in ``held``.

    A piece that several ranks hold comes from the target itself if it is one of them; else from the one that has the
    least to send so far.

    Args:
        rank: this rank; it need not be in either.
        held: boxes of one name are, between any two, equal or disjoint.
        wanted: likewise; a box may be wanted by many ranks, or twice by one (a tied embedding).
        largest: elements of one piece; larger ones are cut along their first dimension.

    Raises:
        ExecutionError: something is wanted that no rank holds.
    """
    holders: dict[str, dict[Fragment, dict[int, int]]] = {}  # name -> box -> rank -> its first item with that box
    for source in sorted(held):
        for item, box in enumerate(held[source]):
            holders.setdefault(box.name, {}).setdefault(box, {}).setdefault(source, item)
    load: dict[int, int] = dict.fromkeys(held, 0)  # elements to send
    seen: set[Fragment] = set()
    local: list[tuple[Cut, Cut]] = []
    sends: dict[int, list[Cut]] = {}
    receives: dict[int, list[Cut]] = {}
    delivered = [0] * len(wanted.get(rank, ()))
    for target in sorted(wanted):
        for item, box in enumerate(wanted[target]):
            if target == rank and box not in seen:
                delivered[item] = box.elements
            seen.add(box)
            found = 0
            for other, by_rank in holders.get(box.name, {}).items():
                piece = box.intersection(other)
                if piece is None:
                    continue
                found += piece.elements
                if target in by_rank:
                    source = target
                else:
                    source = min(by_rank, key=lambda other_rank: (load[other_rank], other_rank))
                    load[source] += piece.elements
                if rank not in (source, target):
                    continue
                for part in _parts(piece, largest):
                    out = Cut(by_rank[source], part.within(other), part.elements)
                    into = Cut(item, part.within(box), part.elements)
                    if source == target:
                        local.append((out, into))
                    elif rank == source:
                        sends.setdefault(target, []).append(out)
                    else:
                        receives.setdefault(source, []).append(into)
            if found != box.elements:
                raise ExecutionError(
                    f"rank {target} wants {box.name!r} from {box.start} to {box.stop}, which no rank holds completely",
                    facts=[f"{box.elements} elements are wanted, {found} found on the source ranks {sorted(held)}"],
                )
    return Route(
        local=tuple(local),
        sends=tuple((peer, tuple(sends[peer])) for peer in sorted(sends)),
        receives=tuple((peer, tuple(receives[peer])) for peer in sorted(receives)),
        delivered=tuple(delivered),
    )


def _parts(piece: Fragment, largest: int) -> Iterable[Fragment]:
    """A piece in parts of at most ``largest`` elements, cut along its first dimension."""
    if piece.elements <= largest or not piece.start:
        return (piece,)
    first, last = piece.start[0], piece.stop[0]
    rows = max(1, largest // (piece.elements // (last - first)))
    return (
        attrs.evolve(piece, start=(begin, *piece.start[1:]), stop=(min(begin + rows, last), *piece.stop[1:]))
        for begin in range(first, last, rows)
    )


def move(
    way: Route,
    sources: Sequence[Tensor],
    targets: Sequence[Tensor],
    *,
    group: torch.distributed.ProcessGroup | None = None,
    bucket_bytes: int = BUCKET_BYTES,
    device: torch.device | None = None,
) -> Moved:
    """Carry out a route; every rank that has a part in it calls this, with the same ``bucket_bytes``.

    Args:
        way: of this rank.
        sources: the tensors of the boxes that this rank holds, in their order; empty when it holds none.
        targets: the tensors of the boxes that it wants; written in place. Those of one box have one type everywhere.
        group: torch group of all ranks concerned, the whole world by default; ranks are global ones.
        bucket_bytes: of one message.
        device: of messages, that of the tensors by default; a version that is kept aside lies in the host's memory.
    """
    with torch.no_grad():
        for out, into in way.local:
            targets[into.item][into.slices].copy_(sources[out.item][out.slices])
        sends = [(peer, _messages(cuts, sources, bucket_bytes)) for peer, cuts in way.sends]
        receives = [(peer, _messages(cuts, targets, bucket_bytes)) for peer, cuts in way.receives]
        rounds = max((len(messages) for _, messages in (*sends, *receives)), default=0)
        wire_bytes = sum(
            _exchange(
                [(peer, messages[number]) for peer, messages in sends if number < len(messages)],
                [(peer, messages[number]) for peer, messages in receives if number < len(messages)],
                sources,
                targets,
                group,
                device,
            )
            for number in range(rounds)
        )
    return Moved(sum(way.delivered), wire_bytes)


def _messages(cuts: Sequence[Cut], tensors: Sequence[Tensor], bucket_bytes: int) -> list[list[Cut]]:
    """The pieces for one peer, in messages of at most ``bucket_bytes`` (or of one piece)."""
    messages: list[list[Cut]] = []
    size = bucket_bytes
    for cut in cuts:
        cut_bytes = _bytes(cut, tensors)
        if size + cut_bytes > bucket_bytes:
            messages.append([])
            size = 0
        messages[-1].append(cut)
        size += cut_bytes
    return messages


def _bytes(cut: Cut, tensors: Sequence[Tensor]) -> int:
    exact = cut.elements * tensors[cut.item].element_size()
    return -(-exact // _ALIGNMENT) * _ALIGNMENT


def _exchange(
    sends: Sequence[tuple[int, list[Cut]]],
    receives: Sequence[tuple[int, list[Cut]]],
    sources: Sequence[Tensor],
    targets: Sequence[Tensor],
    group: torch.distributed.ProcessGroup | None,
    device: torch.device | None,
) -> int:
    """One round of messages; the number of bytes sent."""
    operations, arriving, sent = [], [], 0
    for peer, cuts in receives:
        buffer = _buffer(cuts, targets, device)
        arriving.append((buffer, cuts))
        operations.append(torch.distributed.P2POp(torch.distributed.irecv, buffer, peer, group))
    for peer, cuts in sends:
        buffer = _buffer(cuts, sources, device)
        for part, cut in _views(buffer, cuts, sources):
            part.copy_(sources[cut.item][cut.slices])
        sent += buffer.numel()
        operations.append(torch.distributed.P2POp(torch.distributed.isend, buffer, peer, group))
    for work in torch.distributed.batch_isend_irecv(operations):
        work.wait()
    for buffer, cuts in arriving:
        for part, cut in _views(buffer, cuts, targets):
            targets[cut.item][cut.slices].copy_(part)
    return sent


def _buffer(cuts: Sequence[Cut], tensors: Sequence[Tensor], device: torch.device | None) -> Tensor:
    size = sum(_bytes(cut, tensors) for cut in cuts)
    return torch.empty(size, dtype=torch.uint8, device=device or tensors[cuts[0].item].device)


def _views(buffer: Tensor, cuts: Sequence[Cut], tensors: Sequence[Tensor]) -> Iterable[tuple[Tensor, Cut]]:
    """For each piece its part of the buffer, with the piece's type and shape."""
    offset = 0
    for cut in cuts:
        tensor = tensors[cut.item]
        exact = buffer[offset : offset + cut.elements * tensor.element_size()]
        yield exact.view(tensor.dtype).view([part.stop - part.start for part in cut.slices]), cut
        offset += _bytes(cut, tensors)
