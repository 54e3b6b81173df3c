"""Fixtures that every folder of tests may use."""

from __future__ import annotations

import importlib.metadata
import itertools
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterable, Mapping
from pathlib import Path

import attrs
import pytest

from rpeg_core.plugins.registry import Registry

REPOSITORY = Path(__file__).parents[1]

HARDWARE_MODULE = """
from rpeg_core import AlphaBeta, Device, GemmEfficiency, HardwareProfile, LinkTier, hookimpl

LINK = LinkTier(collective=AlphaBeta(1e-6, 1e11), p2p=AlphaBeta(1e-6, 1e11))

@hookimpl
def rpeg_hardware():
    for name in {names!r}:
        yield HardwareProfile(
            name=name,
            summary="A toy GPU [of] " + name + ".",
            gpus_per_node=4,
            device=Device(memory_bytes=80_000, memory_bandwidth_bytes_per_s=2e12, peak_flops_per_s=1e14),
            tiers=(LINK, LINK, LINK),
            efficiency=GemmEfficiency(gamma_m_rows=512.0, gamma_k_columns=256.0),
            non_gemm_layer_s=1e-4,
            non_gemm_reference_batch=8,
            sources={{"device.memory_bytes": "a datasheet"}},
        )
"""

COST_MODULE = """
import attrs

from rpeg_core import CostTerm, Target, hookimpl, setting

@attrs.frozen(kw_only=True)
class Settings:
    factor: float = setting(1.0, help="Multiplies the time.", minimum=0.0)

def nothing(batch):
    raise NotImplementedError

@hookimpl
def rpeg_cost_terms():
    for name in {names!r}:
        yield CostTerm(
            name=name, summary="A toy term.", target=Target.OPERATOR, quantity="toy",
            function=nothing, settings=Settings,
        )
"""

SEARCH_MODULE = """
import attrs

from rpeg_core import SearchStrategy, hookimpl, setting

@attrs.frozen(kw_only=True)
class Settings:
    seed: int = setting(0, help="Seed of the [random] choices.", minimum=0)
    seconds: float = setting(10.0, help="Wall-clock budget.", unit="s", minimum=0.0)

def run(problem, budget, settings, progress):
    raise NotImplementedError

@hookimpl
def rpeg_search_strategies():
    yield SearchStrategy(
        name={names!r}[0], summary="A toy search.", guarantee="baseline", run=run, settings=Settings
    )
"""

ISOLATED_COMMAND = """
import importlib.metadata, pathlib, sys

def entry_points(group):
    found = importlib.metadata.distributions(path=[str(pathlib.Path.cwd())])
    return [entry for item in found for entry in item.entry_points if entry.group == group]

importlib.metadata.entry_points = entry_points

from rpeg_core.cli.main import main

sys.exit(main())
"""


@attrs.frozen
class Installed:
    """A folder of fake distributions, as pip would have left them."""

    path: Path
    counter: itertools.count[int] = attrs.field(factory=itertools.count)

    def add(
        self,
        distribution: str,
        group: str,
        name: str,
        source: str,
        *,
        version: str = "0.1.0",
        requires: Iterable[str] = ("rpeg-core>=0.1,<0.2",),
        module: str | None = None,
    ) -> str:
        """Add a distribution with one entry point and one module; returns the name of the module."""
        module = module or f"fake_{name.replace('-', '_')}_{next(self.counter)}"
        self.path.joinpath(f"{module}.py").write_text(textwrap.dedent(source))
        info = self.path / f"{distribution.replace('-', '_')}-{version}.dist-info"
        info.mkdir(exist_ok=True)
        lines = ["Metadata-Version: 2.1", f"Name: {distribution}", f"Version: {version}"]
        info.joinpath("METADATA").write_text(
            "\n".join([*lines, *(f"Requires-Dist: {line}" for line in requires)]) + "\n"
        )
        with info.joinpath("entry_points.txt").open("a") as file:
            file.write(f"[{group}]\n{name} = {module}\n")
        return module

    def hardware(self, distribution: str, name: str, *names: str, **options: object) -> str:
        """A working hardware plugin ``name`` with profiles ``names`` (default: one of that name)."""
        source = HARDWARE_MODULE.format(names=names or (name,))
        return self.add(distribution, "rpeg.hardware", name, source, **options)

    def costs(self, distribution: str, name: str, *names: str, **options: object) -> str:
        """A working cost plugin ``name`` with terms ``names``."""
        return self.add(distribution, "rpeg.costs", name, COST_MODULE.format(names=names), **options)

    def search(self, distribution: str, name: str, **options: object) -> str:
        """A working search plugin with two settings."""
        source = SEARCH_MODULE.format(names=(name,))
        return self.add(distribution, "rpeg.search", name, source, **options)

    def entry_points(self, group: str) -> list[importlib.metadata.EntryPoint]:
        """The source of entry points for a :class:`Registry` that sees this folder alone."""
        found = importlib.metadata.distributions(path=[str(self.path)])
        return [entry for item in found for entry in item.entry_points if entry.group == group]

    def registry(self, *, disabled: Iterable[str] = (), strict: bool = False) -> Registry:
        """A registry of what is in this folder."""
        return Registry(disabled=frozenset(disabled), strict=strict, entry_points=self.entry_points)

    def rpeg(self, *arguments: str, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        """Run the command line in a fresh process that finds the plugins of this folder and no others."""
        return self.python("-c", ISOLATED_COMMAND, *arguments, env=env)

    def python(self, *arguments: str, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        """Run Python in a fresh process that finds the distributions of this folder too."""
        path = os.pathsep.join([str(self.path), str(REPOSITORY)])
        environment = {**os.environ, "PYTHONPATH": path, "COLUMNS": "200", **(env or {})}
        return subprocess.run(
            [sys.executable, *arguments],
            env=environment,
            cwd=self.path,
            capture_output=True,
            text=True,
            timeout=400,
            check=False,
        )


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Installed:
    """An empty folder of fake distributions, importable in this process and without a trace afterwards."""
    folder = tmp_path / "site-packages"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delenv("RPEG_DISABLE_PLUGINS", raising=False)
    before = set(sys.modules)
    yield Installed(folder)
    for name in set(sys.modules) - before:
        if name.startswith("fake_"):
            del sys.modules[name]
