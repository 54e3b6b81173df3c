"""Wheels, and environments that hold nothing but what a user would have installed from them."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
import venv
import zipfile
from collections.abc import Callable, Iterable, Mapping
from email.parser import Parser
from pathlib import Path

import attrs
import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

REPOSITORY = Path(__file__).parents[2]
CORE = "rpeg-core"

BUILD = """
import contextlib, json, os, sys
from hatchling.build import build_wheel

wheels, *folders = sys.argv[1:]
built = {}
with contextlib.redirect_stdout(sys.stderr):
    for folder in folders:
        os.chdir(folder)
        try:
            built[folder] = {"wheel": os.path.join(wheels, build_wheel(wheels))}
        except (Exception, SystemExit) as error:
            built[folder] = {"error": f"{type(error).__name__}: {error}"}
json.dump(built, sys.stdout)
"""


class BuildError(Exception):
    """The build backend refused a folder."""


@attrs.frozen
class Wheels:
    """The wheels of this repository, one per distribution, as a package index would offer them.

    Attributes:
        folder: where they lie.
        built: folder of the distribution -> its wheel, or why there is none.
    """

    folder: Path
    built: Mapping[Path, Path | str]

    @property
    def core(self) -> Path:
        return self.of(REPOSITORY)

    @property
    def plugins(self) -> list[Path]:
        """Every plugin wheel; a folder that does not build fails the test of that folder."""
        return [wheel for folder, wheel in self.built.items() if folder != REPOSITORY and isinstance(wheel, Path)]

    def of(self, folder: Path) -> Path:
        """The wheel of a folder of this repository.

        Raises:
            BuildError: it does not build.
        """
        wheel = self.built[folder]
        if isinstance(wheel, str):
            raise BuildError(wheel)
        return wheel

    def named(self, *distributions: str) -> list[Path]:
        """The wheels of these distributions."""
        found = {distribution_of(wheel): wheel for wheel in (self.core, *self.plugins)}
        return [found[name] for name in distributions]

    def needs(self, *distributions: str) -> set[str]:
        """What these distributions ask for, without extras and our own."""
        lines = [line for wheel in self.named(*distributions) for line in metadata(wheel).get("Requires-Dist", [])]
        return set(requirements(lines))


@attrs.frozen
class Environment:
    """A virtual environment outside the checkout with wheels and their declared dependencies, and no more."""

    path: Path

    @classmethod
    def create(cls, path: Path, wheels: Wheels, *chosen: Path) -> Environment:
        """A new environment with ``chosen`` installed by pip, which resolves their requirements.

        Dependencies that are not in ``wheels`` are those of the running environment, by links: nothing is downloaded,
        and a package that no wheel declares is not there.
        """
        venv.EnvBuilder(symlinks=True).create(path)
        environment = cls(path)
        dependencies = path / "dependencies"
        dependencies.mkdir()
        environment.site_packages.joinpath("dependencies.pth").write_text(f"{dependencies}\n")
        environment.install(*chosen, index=wheels.folder)
        return environment

    @property
    def python(self) -> Path:
        return self.path / "bin" / "python"

    @property
    def site_packages(self) -> Path:
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        return self.path / "lib" / version / "site-packages"

    def install(self, *wheels: Path, index: Path, check_requirements: bool = True) -> None:
        """``pip install`` wheels; further distributions come from the folder ``index`` or are linked."""
        link_dependencies(self.path / "dependencies", [*wheels, *index.glob("rpeg_core-*.whl")])
        options = ["--no-compile", "--no-index", "--find-links", str(index)]
        self._pip("install", *options, *([] if check_requirements else ["--no-deps"]), *map(str, wheels))

    def uninstall(self, distribution: str) -> None:
        """``pip uninstall``."""
        self._pip("uninstall", "--yes", distribution)

    def rpeg(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """The command that pip installed."""
        return self._run(str(self.path / "bin" / "rpeg"), *arguments)

    def run_python(self, source: str) -> subprocess.CompletedProcess[str]:
        """The interpreter of this environment."""
        return self._run(str(self.python), "-c", source)

    def _pip(self, command: str, *arguments: str) -> None:
        options = ["--quiet", "--disable-pip-version-check"]
        done = self._run(sys.executable, "-m", "pip", "--python", str(self.python), command, *options, *arguments)
        assert done.returncode == 0, done.stdout + done.stderr

    def _run(self, *command: str) -> subprocess.CompletedProcess[str]:
        ours = ("PYTHON", "PIP_", "RPEG_", "COVERAGE", "PYTEST", "VIRTUAL_ENV")
        clean = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
        return subprocess.run(
            command,
            cwd=self.path,
            env={**clean, "PIP_CONFIG_FILE": os.devnull, "XDG_CACHE_HOME": str(self.path / "cache")},
            capture_output=True,
            text=True,
            timeout=400,
            check=False,
        )


def distribution_of(wheel: Path) -> str:
    """The name of the distribution in a wheel."""
    return canonicalize_name(wheel.name.partition("-")[0])


def requirements(lines: Iterable[str]) -> list[str]:
    """Names that requirement lines ask for without extras, our own distributions left out."""
    parsed = [Requirement(line) for line in lines]
    names = [canonicalize_name(r.name) for r in parsed if r.marker is None or r.marker.evaluate({"extra": ""})]
    return [name for name in names if not name.startswith("rpeg-")]


def metadata(wheel: Path) -> Mapping[str, list[str]]:
    """The fields of a wheel's METADATA."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        parsed = Parser().parsestr(archive.read(name).decode())
    return {key: parsed.get_all(key) or [] for key in set(parsed.keys())}


def link_dependencies(folder: Path, wheels: Iterable[Path]) -> None:
    """Link what ``wheels`` require, and what that requires, from the running environment into ``folder``."""
    pending = [name for wheel in wheels for name in requirements(metadata(wheel).get("Requires-Dist", []))]
    seen: set[str] = set()
    while pending:
        name = pending.pop()
        if name in seen:
            continue
        seen.add(name)
        try:
            found = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue  # pip says so
        for top in {file.parts[0] for file in found.files or ()} - {"..", "__pycache__"}:
            link = folder / top
            if not link.exists():
                link.symlink_to(found.locate_file(top))
        pending += requirements(found.requires or ())


def build_wheels(target: Path, *folders: Path) -> Mapping[Path, Path | str]:
    """The wheel of each folder, by the hook that pip calls, or why there is none."""
    done = subprocess.run(
        [sys.executable, "-c", BUILD, str(target), *map(str, folders)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout)
    return {Path(name): Path(r["wheel"]) if "wheel" in r else r["error"] for name, r in results.items()}


@pytest.fixture(scope="session")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Wheels:
    """Core and every plugin, built once."""
    target = tmp_path_factory.mktemp("wheels")
    plugins = [path.parent for path in sorted(REPOSITORY.glob("plugins/*/*/pyproject.toml"))]
    return Wheels(target, build_wheels(target, REPOSITORY, *plugins))


@pytest.fixture
def build(tmp_path: Path) -> Callable[[Path], Path]:
    """``build(folder)`` is the wheel of any folder."""

    def wheel(folder: Path) -> Path:
        built = build_wheels(tmp_path, folder)[folder]
        if isinstance(built, str):
            raise BuildError(built)
        return built

    return wheel


@pytest.fixture
def environment(tmp_path: Path, wheels: Wheels) -> Callable[..., Environment]:
    """``environment(*wheels)`` is a new environment with these wheels."""
    return lambda *chosen: Environment.create(tmp_path / "env", wheels, *chosen)


@pytest.fixture(scope="session")
def everything(tmp_path_factory: pytest.TempPathFactory, wheels: Wheels) -> Environment:
    """Core with every plugin of this repository."""
    return Environment.create(tmp_path_factory.mktemp("all") / "env", wheels, wheels.core, *wheels.plugins)
