"""``rpeg profile-lengths``: how long the responses of an experiment's model are, as a file for its workload."""

from __future__ import annotations

import contextlib
import os
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import click

from rpeg_core.cli import ui
from rpeg_core.cli.backends import backend_settings, interruptible
from rpeg_core.cli.context import CommandContext, pass_context
from rpeg_core.cli.exit_codes import ExitCode
from rpeg_core.errors import BackendError, PlanFileError, UsageError

if TYPE_CHECKING:
    from rpeg_core.planning.planner import Planner
    from rpeg_core.plugins.registry import Registry
    from rpeg_core.records import BackendSpec
    from rpeg_core.runtime.lengths import Response
    from rpeg_core.spec.workload import LengthQuantile

__all__ = ["command"]

BINS = 12
"""Rows of the histogram, at most."""

BAR = 40
"""Characters of its longest bar."""

MANY_CUT = 0.05
"""Above this share of responses that hit the limit the limit shapes the lengths, and the reward."""


class _Fractions(click.ParamType):
    """``0.5,0.85,1.0``."""

    name = "F,F,..."

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[float, ...]:
        if isinstance(value, tuple):
            return value
        try:
            found = tuple(float(part) for part in value.split(","))
        except ValueError:
            found = ()
        rising = all(a < b for a, b in zip((0.0, *found), found, strict=False))
        if not found or not rising or found[-1] > 1.0:
            self.fail(
                f"{value!r} is not a list of increasing shares above 0 and up to 1, e.g. 0.5,0.85,1.0", param, ctx
            )
        return found


@click.command("profile-lengths")
@click.argument("experiment", type=click.Path(path_type=Path))
@click.option(
    "--prompts", type=click.IntRange(1), default=128, show_default=True, help="Prompts to answer, one response each."
)
@click.option(
    "--quantiles", type=_Fractions(), default="0.5,0.85,1.0", show_default=True, help="Shares of finished responses."
)
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), default=Path("lengths.csv"), show_default=True, help="CSV file."
)
@click.option("--backend", metavar="NAME", help="What generates; by default the only backend installed that can.")
@click.option("--workers", type=click.IntRange(1), help="Processes; by default the GPUs, or cores, of this machine.")
@click.option("--tp", type=click.IntRange(1), default=1, show_default=True, help="Tensor-parallel degree of a replica.")
@click.option("--set", "overrides", multiple=True, metavar="NAME.KEY=VALUE", help="A backend setting; repeatable.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@pass_context
def command(
    context: CommandContext,
    experiment: Path,
    prompts: int,
    quantiles: tuple[float, ...],
    output: Path,
    backend: str | None,
    workers: int | None,
    tp: int,
    overrides: tuple[str, ...],
    as_json: bool,
) -> int:
    """Measure the response lengths of EXPERIMENT's model on a sample of its prompts.

    The model that generates answers with the weights that the experiment names, on the GPUs or cores of this machine;
    responses end at workload.response_tokens at the latest. The file has what `workload.response_lengths: lengths.csv`
    reads: the shares of --quantiles and the tokens after which they are finished. Measure again when training has
    changed the lengths. Ctrl-C keeps what was measured and ends with 130.
    """
    from rpeg_core.cli import planning
    from rpeg_core.report.words import plural
    from rpeg_core.runtime.lengths import LengthsRequest, generation_alone
    from rpeg_core.runtime.lengths import quantiles as quantiles_of
    from rpeg_core.spec.experiment import load_experiment

    record = _backend(context.registry, backend)
    found = load_experiment(experiment)
    settings = backend_settings(record, found.settings, overrides, "the rest is the experiment's")
    planning.writable(output, experiment)
    planner = planning.make_planner(found, context.registry, [])
    graph = generation_alone(planner.graph(planner.structures()[0]))
    assert record.profile is not None  # _backend refuses those that do not measure
    responses: list[Response] = []
    with interruptible("stopping; what was measured is kept") as pressed, ui.progress("measuring lengths") as show:

        def measured(batch: Sequence[Response]) -> None:
            responses.extend(batch)
            show(f"{len(responses)} of {plural(prompts, 'response')}, mean {_mean(responses):,.0f} tokens")

        request = LengthsRequest(
            experiment=found,
            graph=graph,
            responses=prompts,
            workers=workers,
            tensor=tp,
            measured=measured,
            cancelled=pressed.is_set,
            status=show,
        )
        with contextlib.suppress(KeyboardInterrupt):  # the second Ctrl-C, too, keeps what was measured
            record.profile(request, settings)
    if not responses:
        raise KeyboardInterrupt  # there is nothing to keep
    limit = found.workload.response_tokens
    profile = _Profile(
        responses=tuple(responses),
        limit=limit,
        pairs=quantiles_of([response.tokens for response in responses], quantiles, limit),
        remarks=(),
    )
    profile = attrs.evolve(profile, remarks=tuple(_remarks(profile, planner, graph.models[0].name)))
    interrupted = len(responses) < prompts
    _write(output, profile.pairs)
    if as_json:
        ui.print_json(_document(experiment, profile, output, interrupted=interrupted))
    else:
        _show(profile, output, experiment)
    for remark in profile.remarks:
        ui.print_warning(remark)
    if interrupted:
        ui.print_note(f"interrupted: {output} is of {len(responses)} of {plural(prompts, 'response')}")
        return ExitCode.INTERRUPTED
    return ExitCode.DONE


def _backend(registry: Registry, name: str | None) -> BackendSpec:
    """The backend that measures.

    Raises:
        MissingPluginError, PluginError: it is not installed, or broken.
        UsageError: several can; one has to be named.
        BackendError: none can, or this machine lacks what it needs.
    """
    able = {loaded.name: loaded.record for loaded in registry.records("backend") if loaded.record.profile is not None}
    if name is not None:
        record: BackendSpec = registry.get("backend", name).record
        if record.profile is None:
            raise BackendError(
                f"backend {name!r} cannot measure lengths",
                facts=[f"backends that do: {', '.join(sorted(able)) or 'none'}"],
            )
    elif len(able) == 1:
        (record,) = able.values()
    elif able:
        raise UsageError("--backend is missing", facts=[f"allowed: {', '.join(sorted(able))}"])
    else:
        raise BackendError("no backend that can measure lengths is installed", hint="pip install 'rpeg-core[run]'")
    reason = record.probe()
    if reason is not None:
        raise BackendError(f"backend {record.name!r} cannot be used on this machine", facts=[reason])
    return record


@attrs.frozen(kw_only=True)
class _Profile:
    """What was measured."""

    responses: tuple[Response, ...]
    limit: int
    pairs: tuple[LengthQuantile, ...]
    remarks: tuple[str, ...]

    @property
    def tokens(self) -> list[int]:
        return [response.tokens for response in self.responses]

    @property
    def cut(self) -> int:
        return sum(response.cut for response in self.responses)

    def bins(self) -> list[tuple[int, int, int]]:
        """(first token, last token, responses) of equal ranges up to the longest response."""
        longest = max(self.tokens)
        width = -(-longest // BINS)
        count = -(-longest // width)
        return [
            (low + 1, min(low + width, longest), sum(low < tokens <= low + width for tokens in self.tokens))
            for low in range(0, count * width, width)
        ]


def _mean(responses: Sequence[Response]) -> float:
    return statistics.fmean(response.tokens for response in responses)


def _remarks(profile: _Profile, planner: Planner, model: str) -> list[str]:
    """What the user must know to read the numbers."""
    found = []
    experiment = planner.experiment
    role = model if model in experiment.models else next(iter(experiment.models))
    if role not in experiment.weights:
        found.append(f"models.{role} names no weights: these are lengths of a model with random ones")
    share = profile.cut / len(profile.responses)
    if share > MANY_CUT:
        found.append(
            f"{share:.0%} of the responses have no end within workload.response_tokens: {profile.limit}; "
            "raise it, or their true lengths stay unknown"
        )
    longest = max(profile.tokens)
    if not profile.cut and longest < 0.75 * profile.limit:
        found.append(
            f"the longest response has {longest} of workload.response_tokens: {profile.limit}; a lower limit "
            "would save memory, and time that the plan predicts"
        )
    if len(profile.pairs) == 1:
        found.append("the responses do not end early enough to be worth a length phase: the file has one length only")
    return found


def _write(path: Path, pairs: Sequence[LengthQuantile]) -> None:
    lines = ["fraction,tokens", *(f"{pair.fraction:.12g},{pair.tokens}" for pair in pairs)]
    try:
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    except OSError as error:
        raise PlanFileError(f"cannot write {path}", facts=[error.strerror or str(error)]) from error


def _document(path: Path, profile: _Profile, output: Path, *, interrupted: bool) -> dict[str, Any]:
    return {
        "experiment_file": str(path),
        "interrupted": interrupted,
        "responses": len(profile.responses),
        "limit_tokens": profile.limit,
        "mean_tokens": statistics.fmean(profile.tokens),
        "median_tokens": statistics.median(profile.tokens),
        "max_tokens": max(profile.tokens),
        "cut_share": profile.cut / len(profile.responses),
        "response_lengths": [[pair.fraction, pair.tokens] for pair in profile.pairs],
        "histogram": [{"from": low, "to": high, "responses": count} for low, high, count in profile.bins()],
        "lengths_file": str(output),
        "warnings": list(profile.remarks),
    }


def _show(profile: _Profile, output: Path, experiment: Path) -> None:
    named = os.path.relpath(output, experiment.parent)  # as the experiment reads it
    tokens, count = profile.tokens, len(profile.responses)
    ui.print_fields(
        {
            "responses": count,
            "mean tokens": round(statistics.fmean(tokens), 1),
            "median tokens": statistics.median(tokens),
            "longest": max(tokens),
            "at the limit": f"{profile.cut / count:.1%} ({profile.cut} at {profile.limit} tokens)",
        }
    )
    ui.print_text("\n" + "\n".join(_histogram(profile.bins())))
    ui.print_text("")
    ui.print_table(["fraction", "tokens"], [(pair.fraction, pair.tokens) for pair in profile.pairs])
    ui.print_text(f"\nwritten: {output}\nnext: workload.response_lengths: {named} in {experiment}, then rpeg plan")


def _histogram(bins: Sequence[tuple[int, int, int]]) -> list[str]:
    most, width = max(count for _, _, count in bins), len(f"{bins[-1][1]:,}")
    bar = "█" if ui.is_terminal() else "#"
    return [
        f"{low:>{width},} - {high:>{width},}  {bar * round(BAR * count / most):<{BAR}}  {count}".rstrip()
        for low, high, count in bins
    ]
