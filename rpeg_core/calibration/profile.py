"""From the measurements of a machine to its hardware profile."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import attrs

from rpeg_core.calibration.accuracy import role_errors
from rpeg_core.calibration.kernels import GemmFit, LinkFit, fit_gemms, fit_link
from rpeg_core.calibration.measurements import Measurements, OperatorTime
from rpeg_core.calibration.refine import GUESS, Errors, Parameter, Terms, errors_of, refine
from rpeg_core.spec.machine import AlphaBeta, Device, HardwareProfile, LinkTier
from rpeg_core.spec.software import Software

__all__ = ["Calibration", "calibrated", "software_sources"]

SYNCHRONOUS = {
    "forward_layer_s": 4e-4,
    "backward_layer_s": 6e-4,
    "pass_s": 4e-4,
    "update_s": 1e-3,
    "update_layer_s": 4e-4,
    "token_layer_s": 3e-4,
    "token_step_s": 3e-4,
    "token_sequence_s": 2e-6,
    "token_exchange_s": 2e-4,
    "attention_share": 0.5,
    "cache_passes": 2.0,
    "pointwise_passes": 3.0,
    "score_bytes": 30.0,
    "logit_passes": 3.0,
    "sampling_passes": 3.0,
    "stream_share": 0.7,
    "optimizer_passes": 2.0,
}
"""Where the fit starts on CPU cores."""

ASYNCHRONOUS = {**SYNCHRONOUS, "score_bytes": 20.0, "optimizer_passes": 1.2, "stream_share": 1.0}
"""And on GPUs, whose host is a CPU core."""


@attrs.frozen(kw_only=True)
class Calibration:
    """A profile with what it was fitted to.

    Attributes:
        profile: complete, with its sources.
        gemm, collective, p2p: the fits of kernels and messages; None: a machine with one device.
        parameters: of the software.
        operators, predicted_s: the measured operators and what the profile says of them.
        errors: of these.
    """

    profile: HardwareProfile
    gemm: GemmFit
    collective: LinkFit | None
    p2p: LinkFit | None
    parameters: tuple[Parameter, ...]
    operators: tuple[OperatorTime, ...]
    predicted_s: tuple[float, ...]
    errors: Errors

    def document(self) -> dict[str, Any]:
        """For the profile's file: residuals and confidence."""
        links = {"collective": self.collective, "p2p": self.p2p}
        return {
            "gemm": {"shapes": self.gemm.shapes, "median_error": self.gemm.median_error},
            "links": {
                name: None if fit is None else {"sizes": fit.sizes, "median_error": fit.median_error}
                for name, fit in links.items()
            },
            "software": {parameter.name: {"uncertainty": parameter.uncertainty} for parameter in self.parameters},
            "operators": {
                "count": self.errors.count,
                "mape": self.errors.mape,
                "bias": self.errors.bias,
                "rows": [
                    {"name": operator.name, "measured_s": operator.seconds, "predicted_s": predicted}
                    for operator, predicted in zip(self.operators, self.predicted_s, strict=True)
                ],
            },
        }


def calibrated(
    found: Measurements, terms: Terms, *, progress: Callable[[float], None] = lambda share: None
) -> Calibration:
    """Fit everything."""
    gemm = fit_gemms(
        found.gemms, bytes_per_element=found.bytes_per_element, bandwidth_bytes_per_s=found.copy_bytes_per_s
    )
    fits = {
        pattern: fit_link(times) if (times := [m for m in found.messages if m.pattern == pattern]) else None
        for pattern in ("all_reduce", "p2p")
    }
    none = AlphaBeta(0.0, found.copy_bytes_per_s)
    collective, p2p = fits["all_reduce"], fits["p2p"]
    link = LinkTier(collective=none if collective is None else collective.link, p2p=none if p2p is None else p2p.link)
    start = SYNCHRONOUS if found.software.launches == "synchronous" else ASYNCHRONOUS
    several = any(operator.data * operator.pipeline * operator.tensor > 1 for operator in found.operators)
    software = attrs.evolve(found.software, **start, node_s=found.node_s or 0.0)
    if not several:
        software = attrs.evolve(software, token_exchange_s=0.0)
    unfitted = HardwareProfile(
        name="calibrated",
        summary=f"{found.device}, {found.devices} devices, calibrated at {found.at}",
        gpus_per_node=found.devices,
        device=Device(
            memory_bytes=found.memory_bytes,
            memory_bandwidth_bytes_per_s=found.copy_bytes_per_s,
            peak_flops_per_s=gemm.peak_flops_per_s,
        ),
        tiers=(link, link, link),
        efficiency=gemm.efficiency,
        non_gemm_layer_s=0.0,
        non_gemm_reference_batch=1,
        software=software,
    )
    refined = refine(unfitted, found.operators, terms, spread=GUESS, progress=progress)
    errors = errors_of(found.operators, refined.after)
    assert refined.profile.software is not None
    profile = attrs.evolve(
        refined.profile,
        sources={
            **_sources(found, gemm, collective, p2p),
            **software_sources(refined.profile.software, refined.parameters, errors, f"{_when(found)}"),
        },
        errors=role_errors(refined.profile, found.operators, refined.left_out, _when(found)),
    )
    return Calibration(
        profile=profile,
        gemm=gemm,
        collective=collective,
        p2p=p2p,
        parameters=refined.parameters,
        operators=found.operators,
        predicted_s=refined.after,
        errors=errors,
    )


def _when(found: Measurements) -> str:
    return f"measured by rpeg calibrate on {found.device} with {found.versions} at {found.at}"


def _sources(found: Measurements, gemm: GemmFit, collective: LinkFit | None, p2p: LinkFit | None) -> dict[str, str]:
    when = _when(found)
    by_gemm = f"fit to {gemm.shapes} matrix products, median error {gemm.median_error:.1%}; {when}"
    sources = {
        "gpus_per_node": f"devices of this machine; {when}",
        "device.memory_bytes": f"detected, memory of the machine over its devices on CPU cores; {when}",
        "device.memory_bandwidth_bytes_per_s": f"a large copy, read plus written; {when}",
        "device.peak_flops_per_s": by_gemm,
        "efficiency.gamma_m_rows": by_gemm,
        "efficiency.gamma_k_columns": by_gemm,
        "non_gemm_layer_s": "0: software.pointwise_passes and the host times stand for it",
        "non_gemm_reference_batch": "1: without meaning beside non_gemm_layer_s 0",
    }
    for tier in ("intra_node", "inter_node", "inter_rack"):
        for traffic, fit in (("collective", collective), ("p2p", p2p)):
            if fit is None:
                text = f"not measured: one device; no latency and the speed of a copy; {when}"
            else:
                pattern = "AllReduces" if traffic == "collective" else "messages"
                text = f"fit to {fit.sizes} sizes of {pattern}, median error {fit.median_error:.1%}; {when}"
            if tier != "intra_node":
                text = f"not measured, that of intra_node: {text}"
            sources |= {f"tiers.{tier}.{traffic}.{name}": text for name in ("latency_s", "bandwidth_bytes_per_s")}
    return sources


def software_sources(software: Software, parameters: Sequence[Parameter], errors: Errors, when: str) -> dict[str, str]:
    """Where each number of the software comes from."""
    fitted = {parameter.name: parameter for parameter in parameters}
    sources = {}
    for field in attrs.fields(Software):
        if not isinstance(getattr(software, field.name), int | float):
            continue
        if field.name in fitted:
            uncertainty = fitted[field.name].uncertainty
            known = f"within {uncertainty:.0%}" if uncertainty < 1.0 else "hardly known from these"
            text = f"fit to {errors.count} operators, error {errors.mape:.1%} on average, {known}; {when}"
        else:
            text = f"not fitted: a fact of the backend, or nothing that was measured depends on it; {when}"
        sources[f"software.{field.name}"] = text
    return sources
