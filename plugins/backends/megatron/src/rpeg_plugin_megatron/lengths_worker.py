"""The worker of ``rpeg profile-lengths``: it generates, tells the lengths, and keeps no rows."""

from __future__ import annotations

import attrs

from rpeg_core.runtime.lengths import Response
from rpeg_core.runtime.semantics import Content
from rpeg_plugin_megatron import rows as rows_of
from rpeg_plugin_megatron.messages import Execute, Measured
from rpeg_plugin_megatron.worker import Worker

__all__ = ["LengthsWorker"]


class LengthsWorker(Worker):
    """A worker of a plan with one generation operator; it may be for another width, which lengths do not depend on."""

    def _check_plan(self) -> None:
        """Nothing is charged."""

    def execute(self, message: Execute) -> Measured:
        """Generate, and report the lengths: the first rank of each replica, in the order of its prompts."""
        done = super().execute(message)
        responses: tuple[Response, ...] = ()
        for key, value in list(self.store.all_rows()):
            at = key.place.coordinates(self.rank)
            if self._job.semantics.contents[key.container] is Content.SEQUENCES and at.pp == at.tp == 0:
                tokens = value.tensor[:, self.plan.workload.prompt_tokens :]
                counts = rows_of.response_mask(tokens, self._data.tokenizer.end_ids).sum(dim=1).tolist()
                ended = rows_of.is_any(tokens, self._data.tokenizer.end_ids).any(dim=1).tolist()
                responses = tuple(Response(count, not end) for count, end in zip(counts, ended, strict=True))
            self.store.drop(key.node, key.container)
        return Measured(**attrs.asdict(done, recurse=False), responses=responses)
