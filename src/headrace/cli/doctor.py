"""``headrace doctor``: what is installed, what is missing, and the command that mends it."""

from __future__ import annotations

import ctypes.util
import os
import platform
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import Literal, NamedTuple

from packaging.requirements import Requirement
from rich.console import Console
from rich.table import Table
from rich.text import Text

from headrace._kernels.threads import available_cores
from headrace.cli.records import Command
from headrace.errors import ConfigError, installed_version

State = Literal["ok", "absent", "broken"]
_MARKS: dict[State, tuple[str, str]] = {"ok": ("✓", "green"), "absent": ("–", "yellow"), "broken": ("✗", "bold red")}


class Finding(NamedTuple):
    """A line of the report: what was looked at, how it is, and what to do if it is not well."""

    subject: str
    state: State
    what: str
    remedy: str = ""


@dataclass(frozen=True, kw_only=True)
class DoctorOptions:
    """Look at versions, threads, extras, OpenGL and GPU, step a real task and draw a real image. An absent extra is no
    fault; exit code 1 means that the core itself does not work."""

    gpu: bool = False
    """Compare random numbers and physics on the CUDA device of torch with those of the CPU."""


def _doctor(given: DoctorOptions) -> int:
    console = Console()
    if given.gpu:
        return _check_gpu(console)
    with Console(stderr=True).status(
        "looking (the first time on a machine it compiles kernels, for up to a few minutes)"
    ):
        findings = [*core(), *threads(), *works(), *extras(), *opengl(), *libero(), *gpu()]
    console.print(_table("headrace doctor", ("", "what", "found", "to mend it"), findings))
    broken = [finding.subject for finding in findings if finding.state == "broken"]
    console.print(f"broken: {', '.join(broken)}" if broken else "The core works.")
    return 1 if broken else 0


def _table(title: str, columns: Sequence[str], findings: Sequence[Finding]) -> Table:
    table = Table(title=title)
    for column in columns:
        table.add_column(column, overflow="fold")
    for finding in findings:
        cells = (Text(*_MARKS[finding.state]), finding.subject, Text(finding.what), Text(finding.remedy))
        table.add_row(*cells[: len(columns)])
    return table


def _check_gpu(console: Console) -> int:
    """Print one line per comparison; exit code 1 where one does not hold, 2 without a GPU."""
    import torch

    if not torch.cuda.is_available():
        console.print("doctor --gpu: torch finds no CUDA device; install a build of torch with CUDA, and a driver")
        return 2
    from headrace.testing.parts import check_gpu

    checks = check_gpu()
    found = [Finding(check.name, "ok" if check.ok else "broken", check.found) for check in checks]
    columns = ("", "compared with the CPU", "found")
    console.print(_table(f"headrace doctor --gpu: {torch.cuda.get_device_name()}", columns, found))
    return 0 if all(check.ok for check in checks) else 1


def core() -> list[Finding]:
    """Python, headrace and the libraries that it always needs, against what its package asks for."""
    fits = sys.version_info >= (3, 11)
    found = [
        Finding("python", "ok" if fits else "broken", platform.python_version(), "" if fits else "use Python 3.11"),
        Finding("headrace", "ok", metadata.version("headrace")),
    ]
    return found + [_library(need) for need, extra in _needs() if extra is None]


def extras() -> list[Finding]:
    """One line per extra: all of its packages, or those that are missing."""
    by_extra: dict[str, list[Finding]] = {}
    for need, extra in _needs():
        if extra is not None and extra not in ("dev", "docs"):
            by_extra.setdefault(extra, []).append(_library(need))
    found: list[Finding] = []
    for extra, libraries in sorted(by_extra.items()):
        unwell = [library for library in libraries if library.state != "ok"]
        shown = ", ".join(f"{library.subject} {library.what}" for library in unwell or libraries)
        remedy = f"pip install 'headrace[{extra}]'" if unwell else ""
        found.append(Finding(f"extra {extra}", "absent" if unwell else "ok", shown, remedy))
    return found


def threads() -> list[Finding]:
    """Cores and the settings that divide them."""
    import torch

    cores = available_cores()
    held = {
        name: os.environ[name]
        for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "HEADRACE_NUM_THREADS")
        if name in os.environ
    }
    shown = ", ".join(f"{name}={value}" for name, value in held.items()) or "no limits set"
    remedy = "" if torch.get_num_threads() == 1 else "in loops over small networks: torch.set_num_threads(1)"
    return [Finding("threads", "ok", f"{cores} cores, torch uses {torch.get_num_threads()}, {shown}", remedy)]


def works() -> list[Finding]:
    """Step a task and draw a picture of it, for real."""
    import torch

    import headrace

    env = headrace.make("cartpole-camera", 2, overrides={"pixels": 16})
    env.reset(seed=0)
    step = env.step(torch.zeros(2, 1))
    drawn = int(step.obs["policy"].float().std() > 0)
    env.close()
    return [
        Finding("a step of cartpole", "ok" if bool(step.reward.isfinite().all()) else "broken", "MuJoCo physics"),
        Finding("an image of it", "ok" if drawn else "broken", "native camera, no OpenGL needed"),
    ]


def opengl() -> list[Finding]:
    """Return the libraries that MuJoCo's own renderer loads; only the renderer ``gl`` needs one."""
    packages = {"EGL": "libegl1 libegl-mesa0 libgl1-mesa-dri", "OSMesa": "libosmesa6"}
    found: list[Finding] = []
    for name, debian in packages.items():
        library = ctypes.util.find_library(name)
        remedy = "" if library else f"apt-get install {debian}  (only for the renderer gl)"
        found.append(Finding(f"OpenGL, {name}", "ok" if library else "absent", library or "not found", remedy))
    return found


def libero() -> list[Finding]:
    """LIBERO's assets, and how many of its tasks are exported."""
    from headrace.envs.tasks.libero.exported import export_directory, find_assets, find_missing_files
    from headrace.envs.tasks.libero.names import libero_names

    there = [name for name in libero_names() if (export_directory() / f"{name.replace('/', '-')}.npz").is_file()]
    found = f"{len(there)} of {len(libero_names())} tasks in {export_directory()}"
    whole = len(there) == len(libero_names())
    remedy = "" if whole else "headrace libero export --python …"
    lines = [Finding("LIBERO", "ok" if whole else "absent", found, remedy)]
    try:
        assets = find_assets()
    except ConfigError as error:
        return [*lines, Finding("LIBERO, assets", "absent", "not found", str(error))]
    missing = find_missing_files(assets)
    what = f"{assets}, without {len(missing)} files, the first of {missing[0]}" if missing else str(assets)
    return [*lines, Finding("LIBERO, assets", "absent" if missing else "ok", what)]


def gpu() -> list[Finding]:
    """Return what torch sees; ``doctor --gpu`` tries it out."""
    import torch

    if torch.cuda.is_available():
        return [Finding("GPU", "ok", torch.cuda.get_device_name(), "try it out: headrace doctor --gpu")]
    return [Finding("GPU", "absent", "none that torch can use", "not needed")]


def _needs() -> list[tuple[Requirement, str | None]]:
    """Return the requirements of the installed package, each with its extra."""
    found: list[tuple[Requirement, str | None]] = []
    for line in metadata.requires("headrace") or []:
        need = Requirement(line)
        extra = None if need.marker is None else str(need.marker).partition("extra == ")[2].strip("\"'") or None
        if need.name != "headrace":
            found.append((need, extra))
    return found


def _library(need: Requirement) -> Finding:
    """How an installed package meets a requirement."""
    command = f"pip install '{need.name}{need.specifier}'"
    version = installed_version(need.name)
    if version is None:
        return Finding(need.name, "broken", "not installed", command)
    if need.specifier.contains(version, prereleases=True):
        return Finding(need.name, "ok", version)
    return Finding(need.name, "broken", f"{version}, expected {need.specifier}", command)


COMMANDS = {"doctor": Command(DoctorOptions, _doctor)}
