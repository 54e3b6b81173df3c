"""The profile ``host``: what :mod:`machine` finds and :mod:`measure` measures, kept in the user's cache folder.

Kept by processor, number of cores and versions; a machine that changed is measured again. One file per machine in
``$XDG_CACHE_HOME/rpeg`` (``~/.cache/rpeg``); to measure anew, delete it.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import attrs
import cattrs

from rpeg_core import AlphaBeta, Device, GemmEfficiency, HardwareProfile, LinkTier, __version__
from rpeg_plugin_host import NAME
from rpeg_plugin_host.kernels import LAYER, STREAM_BYTES
from rpeg_plugin_host.machine import cores, memory_bytes, processor
from rpeg_plugin_host.measure import Measurement, measure

__all__ = ["Kept", "cache_file", "host_profile", "profile_of"]

DISTRIBUTION = "rpeg-plugin-host"


@attrs.frozen(kw_only=True)
class Kept:
    """The content of the cache file."""

    processor: str
    cores: int
    versions: str
    measurement: Measurement


def host_profile(report: Callable[[str], None], *, measured: Callable[[int], Measurement] = measure) -> HardwareProfile:
    """The profile of this machine; measures it unless that was done before.

    Args:
        report: told in one line before and after measuring.
        measured: measures so many cores.

    Raises:
        RuntimeError, TimeoutError, OSError: measuring failed.
    """
    name, count = processor(), cores()
    versions = f"rpeg-core {__version__}, {DISTRIBUTION} {importlib.metadata.version(DISTRIBUTION)}"
    path = cache_file(name, count, versions)
    kept = _read(path)
    if kept is None or (kept.processor, kept.cores, kept.versions) != (name, count, versions):
        report(f"measuring this machine, once: {name}, {count} {'core' if count == 1 else 'cores'}; some seconds")
        kept = Kept(processor=name, cores=count, versions=versions, measurement=measured(count))
        saved = _write(path, kept)
        took = f"measured in {kept.measurement.seconds:g} s"
        report(f"{took}, kept in {path}" if saved is None else f"{took}, not kept: {saved}")
    return profile_of(kept, memory_bytes())


def profile_of(kept: Kept, memory: int) -> HardwareProfile:
    """The profile made of a measurement.

    Args:
        kept: the measurement.
        memory: bytes that all devices share.
    """
    found, gemm, links = kept.measurement, kept.measurement.gemm, kept.measurement.links
    together = f"{found.processes} cores at once" if found.processes > 1 else "one core"
    when = f"measured on this machine by {DISTRIBUTION} at {found.at}, {together}"
    by_gemm = (
        f"fit to {gemm.shapes} compute-bound FP32 GEMMs of numpy, one thread each, median error "
        f"{gemm.median_error:.1%}; {when}"
    )
    by_copy = f"a copy of {STREAM_BYTES // 2**20} MiB by numpy, bytes read and written; {when}"
    by_ping = f"half a round trip, the lower tenth of 400, over TCP on the loopback interface; {when}"
    one_way = f"16 MiB one way over TCP on the loopback interface; {when}"
    both_ways = f"16 MiB both ways at once over TCP on the loopback interface; {when}"
    sequences, tokens, hidden = LAYER
    link = LinkTier(
        collective=AlphaBeta(links.latency_s, links.both_ways_bytes_per_s),
        p2p=AlphaBeta(links.latency_s, links.one_way_bytes_per_s),
    )
    tiers = {
        f"tiers.{tier}.{traffic}.{number}": source
        for tier in ("intra_node", "inter_node", "inter_rack")
        for traffic, bandwidth in (("collective", both_ways), ("p2p", one_way))
        for number, source in (("latency_s", by_ping), ("bandwidth_bytes_per_s", bandwidth))
    }
    return HardwareProfile(
        name=NAME,
        summary=f"{kept.processor}, {kept.cores} {'core' if kept.cores == 1 else 'cores'}, one device each",
        gpus_per_node=kept.cores,
        device=Device(
            memory_bytes=memory // kept.cores,
            memory_bandwidth_bytes_per_s=found.copy_bytes_per_s,
            peak_flops_per_s=gemm.peak_flops_per_s,
        ),
        tiers=(link, link, link),
        efficiency=GemmEfficiency(gamma_m_rows=gemm.gamma_m_rows, gamma_k_columns=gemm.gamma_k_columns),
        non_gemm_layer_s=found.layer_s,
        non_gemm_reference_batch=sequences,
        errors=(),  # published runs are of GPUs; `rpeg calibrate` measures this machine's own
        sources={
            "gpus_per_node": "the cores that the scheduler and the control group allow this process, detected now",
            "device.memory_bytes": (
                f"the memory of this machine, or the limit of its control group, detected now, by {kept.cores} devices"
            ),
            "device.memory_bandwidth_bytes_per_s": by_copy,
            "device.peak_flops_per_s": by_gemm,
            **tiers,
            "efficiency.gamma_m_rows": by_gemm,
            "efficiency.gamma_k_columns": by_gemm,
            "non_gemm_layer_s": (
                f"two norms and two residual additions of {sequences} x {tokens} x {hidden} FP32 by numpy; {when}"
            ),
            "non_gemm_reference_batch": "the sequences of non_gemm_layer_s, a choice: the least that rule P5 admits",
        },
    )


def cache_file(name: str, count: int, versions: str) -> Path:
    """Where the measurement of such a machine is kept."""
    base = os.environ.get("XDG_CACHE_HOME")
    folder = (Path(base) if base else Path.home() / ".cache") / "rpeg"
    digest = hashlib.sha256(json.dumps([name, count, versions]).encode()).hexdigest()
    return folder / f"host-{digest[:12]}.json"


def _read(path: Path) -> Kept | None:
    """What is kept there; None when nothing is, or nothing that can be read."""
    try:
        return _CONVERTER.structure(json.loads(path.read_text(encoding="utf-8")), Kept)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, cattrs.BaseValidationError):
        return None


def _write(path: Path, kept: Kept) -> str | None:
    """Keep it, whole or not at all; why it cannot be kept."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".tmp", delete=False, encoding="utf-8") as file:
            json.dump(_CONVERTER.unstructure(kept), file, indent=1)
        os.replace(file.name, path)
    except OSError as error:
        return error.strerror or str(error)
    return None


_CONVERTER = cattrs.Converter(forbid_extra_keys=True)
