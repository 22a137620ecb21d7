"""Checks one installed wheel in an environment that holds nothing but what the wheel asks for.

Standard library only: the environment has no test tools. Every look at `sys.modules` happens in a
process of its own, since an import cannot be undone.
"""

import argparse
import importlib
import importlib.metadata
import json
import logging
import os
import pkgutil
import re
import subprocess
import sys
import traceback
from collections.abc import Iterator
from typing import Any

TRAINER_FRAMEWORKS = ("accelerate", "deepspeed", "megatron", "peft", "trl")
# Must be neither imported nor installed.
BLOCKED = {
    "wt_common": ("ray", "requests", "torch", "vllm", "wt_trainer", "wt_worker"),
    "wt_trainer": ("ray", "vllm", "wt_worker"),
    "wt_worker": ("ray", "vllm", "wt_trainer", *TRAINER_FRAMEWORKS),
}
# May be installed, and must not be loaded by `import <package>` alone.
LAZY = ("ray", "requests", "torch.distributed.tensor", "vllm")
# These need vLLM, the extra [serve] or Triton, which are not here; the plugin is what vLLM finds, and must import without it.
NEEDS_MORE = re.compile(r"wt_worker\.(vllm\.(?!plugin$)|serve$)|wt_\w+\.(.*\.)?digest_kernel$")
NUM_TIMINGS = 5


def _normalize(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


# In the child process


def _loggers() -> list[logging.Logger]:
    named = (logging.getLogger(name) for name in list(logging.root.manager.loggerDict))
    return [logging.root, *named]


def _side_effects(environment: dict[str, str], handlers: set[logging.Handler]) -> list[str]:
    found = []
    changed = sorted(k for k, _ in environment.items() ^ os.environ.items())
    if changed:
        found.append(f"the environment changed: {', '.join(changed)}")
    found += [
        f"logger {logger.name!r} got the handler {handler!r}"
        for logger in _loggers()
        for handler in logger.handlers
        if handler not in handlers
    ]
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        found.append("CUDA was initialized")
    return found


def _public_modules(package: str) -> Iterator[str]:
    """Imports and yields each public module, a package before what is in it."""
    paths = importlib.import_module(package).__path__
    for module in pkgutil.iter_modules(paths, f"{package}."):
        if module.name.rpartition(".")[2].startswith("_") or NEEDS_MORE.match(module.name):
            continue
        importlib.import_module(module.name)
        yield module.name
        if module.ispkg:
            yield from _public_modules(module.name)


def _check_imports(package: str) -> dict[str, Any]:
    sys.modules.update(dict.fromkeys(BLOCKED[package]))  # None: importing it is an ImportError
    if package != "wt_common":
        importlib.import_module("torch")  # what torch does by itself is not counted
    modules = set(sys.modules)
    environment = dict(os.environ)
    handlers = {handler for logger in _loggers() for handler in logger.handlers}

    importlib.import_module(package)
    loaded = {*sys.modules} - modules
    failures = [f"`import {package}` loads {name}" for name in LAZY if name in loaded]
    failures += [f"`import {package}`: {text}" for text in _side_effects(environment, handlers)]

    num_imported = 0
    try:
        for _ in _public_modules(package):
            num_imported += 1
        if not num_imported:
            failures.append(f"{package} has no public module")
    except ImportError as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        failures.append(f"{where.filename}:{where.lineno}: {type(error).__name__}: {error}")
    if not failures:
        failures = [f"a module of {package}: {t}" for t in _side_effects(environment, handlers)]
    if package == "wt_common":
        foreign = {n.partition(".")[0] for n in {*sys.modules} - modules}
        foreign -= {*sys.stdlib_module_names, package}
        failures += [f"{package} loads {name}, not of the standard library" for name in foreign]
    return {"failures": failures, "num_imported": num_imported}


# In the parent process


def _python(*args: str) -> subprocess.CompletedProcess[str]:
    # -I: neither the working directory nor PYTHONPATH may lend a module.
    return subprocess.run([sys.executable, "-I", *args], capture_output=True, text=True, check=False, timeout=120)


def _check_distributions(package: str) -> list[str]:
    requirements = {
        _normalize(dist.name): [
            _normalize(match[0]) for line in dist.requires or () if (match := re.match(r"[\w.-]+", line))
        ]
        for dist in importlib.metadata.distributions()
    }
    # Markers and extras are not read: that only adds names, and torch asks for no GPU library
    # but its own.
    torch_closure, pending = set[str](), ["torch"]
    while pending:
        name = pending.pop()
        if name not in torch_closure:
            torch_closure.add(name)
            pending += requirements.get(name, ())
    blocked = {_normalize(name) for name in BLOCKED[package]}
    return [
        f"{name} is installed with {package}"
        for name in sorted(requirements)
        if name in blocked or (re.match(r"vllm-|nvidia-|cuda-", name) and name not in torch_closure)
    ]


def _time_import(package: str) -> tuple[float, list[tuple[float, str]]]:
    """Returns what `import package` costs after `import torch`, and each module's share, in ms."""
    result = _python("-X", "importtime", "-c", f"import torch; import {package}")
    if result.returncode:
        raise SystemExit(result.stderr)
    rows = re.findall(r"^import time: +(\d+) \| +(\d+) \| +(\S+)$", result.stderr, re.MULTILINE)
    names = [name for _, _, name in rows]
    after_torch = rows[names.index("torch") + 1 : names.index(package) + 1]
    shares = sorted(((int(own) / 1e3, name) for own, _, name in after_torch), reverse=True)
    return sum(own for own, _ in shares), shares


def _check_cost(package: str, limit_ms: float) -> list[str]:
    timings = sorted(_time_import(package) for _ in range(NUM_TIMINGS))
    total_ms, shares = timings[0]  # other load on the machine only ever adds
    print(f"{package}: {total_ms:.1f} ms beyond torch (least of {NUM_TIMINGS}); the slowest:")
    for own_ms, name in shares[:5]:
        print(f"  {own_ms:7.2f} ms  {name}")
    if total_ms > limit_ms:
        return [f"`import {package}` costs {total_ms:.1f} ms beyond torch, limit {limit_ms:.0f} ms"]
    return []


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("package", choices=BLOCKED)
    parser.add_argument("--limit-ms", type=float, default=60, help="for import, beyond torch's")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(_check_imports(args.package)))
        return 0

    child = _python(__file__, args.package, "--child")
    if child.returncode:
        print(child.stderr, file=sys.stderr)
        return 1
    result = json.loads(child.stdout)
    failures = result["failures"] + _check_distributions(args.package)
    print(f"{args.package}: imported {result['num_imported']} public modules")
    if args.package != "wt_common":
        failures += _check_cost(args.package, args.limit_ms)
    for failure in failures:
        print(f"FAILED {failure}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
