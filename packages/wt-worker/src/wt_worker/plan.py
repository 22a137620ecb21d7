"""How the weights of each layer of a model are installed: in place, or through its loader and why.

    python -m wt_worker.plan --model DIR                     starts vLLM here, on random weights
    python -m wt_worker.plan --url http://HOST:PORT          asks a server about its last round
    python -m wt_worker.plan --url ... --model DIR           asks a server about a round that would send what DIR has

Each rank answers with a `PlanDescription` (`wt_worker.placement.describe`), which is printed as a table or as JSON.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TextIO

from wt_common import ConfigurationError

__all__ = ["checkpoint_rows", "fold", "fold_names", "main", "render"]

EXTENSION = "wt_worker.vllm.describe.PlanExtension"
"""Has the method that a server is asked for. Its module is imported where vLLM is."""

Row = tuple[str, str, list[int]]
"""Name, torch's name of the dtype, and shape of a checkpoint's parameter."""

_DTYPES = {
    "BF16": "bfloat16",
    "BOOL": "bool",
    "C64": "complex64",
    "F16": "float16",
    "F32": "float32",
    "F64": "float64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
    "I16": "int16",
    "I32": "int32",
    "I64": "int64",
    "I8": "int8",
    "U16": "uint16",
    "U32": "uint32",
    "U64": "uint64",
    "U8": "uint8",
}
"""Torch's names of the dtypes in a safetensors header."""


def main(argv: Sequence[str] | None = None) -> None:
    """Print what was asked for; exits with 1 and a text on stderr where that cannot be found out."""
    args = _arguments(argv)
    out: TextIO = sys.stdout
    try:
        rows = None if args.model is None else checkpoint_rows(args.model)
        if args.url is not None:
            answers = _ask(args.url, rows, args.extension, args.timeout)
        else:
            assert rows is not None  # the model is required then
            if importlib.util.find_spec("vllm") is None:
                raise _error("vLLM is not installed here: pip install vllm, or ask a server that runs, with --url")
            out = _keep_stdout()
            answers = _start_vllm(args.model, rows, args.tp, args.dtype)
        _refuse_errors(answers)
    except ConfigurationError as error:
        sys.exit(f"error: {error.message}")
    print(json.dumps(answers, indent=1) if args.json else render(answers), file=out, flush=True)


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m wt_worker.plan", description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--model", type=Path, metavar="DIR", help="a Hugging Face checkpoint's folder, with safetensors"
    )
    parser.add_argument("--json", action="store_true", help="print a JSON list, with one object for each rank")
    start = parser.add_argument_group("without --url, vLLM is started in this process, with random weights")
    start.add_argument("--tp", type=int, metavar="N", help="tensor-parallel ranks (1)")
    start.add_argument("--dtype", help="the model's, as vLLM's own option takes it (auto)")
    ask = parser.add_argument_group(
        f"a running server: start it with VLLM_SERVER_DEV_MODE=1 and --worker-extension-cls {EXTENSION}"
    )
    ask.add_argument("--url", help="of the server; without --model, the question is about its last round")
    ask.add_argument(
        "--extension", metavar="CLASS", help="the server's worker extension, if it is a subclass of that one"
    )
    ask.add_argument("--timeout", type=float, metavar="S", help="seconds to wait for each reply (60)")
    args = parser.parse_args(argv)
    if args.url is None:
        wrong = [name for name in ("extension", "timeout") if getattr(args, name) is not None]
        if args.model is None:
            parser.error("--model or --url is required")
    else:
        wrong = [name for name in ("tp", "dtype") if getattr(args, name) is not None]
        if urllib.parse.urlsplit(args.url).scheme not in {"http", "https"}:
            parser.error(f"--url: expected http://HOST:PORT or https://HOST:PORT, got {args.url!r}")
    if wrong:
        parser.error(
            f"--{wrong[0]} is for {'--url only' if args.url is None else 'a vLLM that is started here, not for --url'}"
        )
    if args.tp is not None and args.tp < 1:
        parser.error(f"--tp: expected at least 1, got {args.tp}")
    args.tp, args.dtype = args.tp or 1, args.dtype or "auto"
    args.extension, args.timeout = args.extension or EXTENSION, args.timeout or 60
    return args


# --- the checkpoint ----------------------------------------------------------------------------------------


def checkpoint_rows(directory: Path) -> list[Row]:
    """What the checkpoint in `directory` has, from its files' headers; weights are not read.

    Raises:
        ConfigurationError: there is no such checkpoint, or a file of it is missing or broken.
    """
    if not directory.is_dir():
        raise _error(
            f"{directory}: no such directory; expected a checkpoint's folder (a model's name is not looked up)"
        )
    if not (directory / "config.json").is_file():
        raise _error(f"{directory}: expected a Hugging Face checkpoint, found no config.json")
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as error:
        raise _error("safetensors is not installed here; it comes with vLLM: pip install vllm") from error
    rows = []
    for path, names in _files(directory).items():
        try:
            with safe_open(str(path), framework="pt") as file:
                for name in names or file.keys():
                    part = file.get_slice(name)
                    rows.append((name, _dtype_name(path, name, part.get_dtype()), list(part.get_shape())))
        except (OSError, SafetensorError) as error:
            raise _error(f"{path}: {error}; is the checkpoint complete?") from error
    return rows


def _files(directory: Path) -> dict[Path, list[str]]:
    """The checkpoint's files, and the names in each; an empty list is all of them."""
    index = next(iter(sorted(directory.glob("*.safetensors.index.json"))), None)
    if index is None:
        whole = directory / "model.safetensors"  # beside it there may be the same in other formats
        files = [whole] if whole.is_file() else sorted(directory.glob("*.safetensors"))
        if not files:
            raise _error(f"{directory}: found no *.safetensors; save the checkpoint with safetensors")
        return {path: [] for path in files}
    found: dict[Path, list[str]] = {}
    try:
        for name, file in json.loads(index.read_text())["weight_map"].items():
            found.setdefault(directory / file, []).append(name)
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise _error(f"{index}: expected a JSON object with weight_map, a file for each name") from error
    return found


def _dtype_name(path: Path, name: str, of_safetensors: str) -> str:
    if of_safetensors not in _DTYPES:
        raise _error(f"{path}: {name} has dtype {of_safetensors}, which has no counterpart in torch")
    return _DTYPES[of_safetensors]


def _error(message: str) -> ConfigurationError:
    return ConfigurationError(message, side="worker")


# --- answers -----------------------------------------------------------------------------------------------


def _keep_stdout() -> TextIO:
    """Standard output as a stream of its own; what vLLM and its processes print goes to standard error, for good."""
    sys.stdout.flush()
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return out


def _start_vllm(directory: Path, rows: list[Row], tensor_parallel_size: int, dtype: str) -> list[dict[str, Any]]:
    from wt_worker.vllm.describe import describe_checkpoint

    try:
        return describe_checkpoint(str(directory), rows, tensor_parallel_size=tensor_parallel_size, dtype=dtype)
    except Exception as error:
        raise _error(f"vLLM did not start on {directory}: {type(error).__name__}: {error}") from error


def _ask(url: str, rows: list[Row] | None, extension: str, timeout_s: float) -> list[dict[str, Any]]:
    """Every rank's answer. The server is asked first whether it can tell: a call that fails puts its ranks out of step."""
    url = url.rstrip("/")
    how = f"start it with VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --worker-extension-cls {extension}"
    info = _request(f"{url}/server_info?config_format=json", None, timeout_s, how)
    try:
        found = info["vllm_config"]["parallel_config"]["worker_extension_cls"]
    except (KeyError, TypeError) as error:
        raise _error(
            f"{url}: /server_info does not name a worker extension; is this a vLLM of 0.26 to 0.33?"
        ) from error
    if found != extension:
        raise _error(
            f"{url}: its worker extension is {found or 'not set'}; {how}, "
            "or give --extension if its own is a subclass of that"
        )
    body = {"method": "wt_plan", "args": [] if rows is None else [rows]}
    results = _request(f"{url}/collective_rpc", body, timeout_s, how)["results"]
    answers: list[dict[str, Any]] = results
    return answers


def _request(url: str, body: dict[str, Any] | None, timeout_s: float, how: str) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})  # noqa: S310  # main checks the scheme
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as reply:  # noqa: S310  # as above
            return json.load(reply)
    except urllib.error.HTTPError as error:
        with error:
            text = error.read(2000).decode(errors="replace")
        if error.code == 404:
            raise _error(f"{url}: the server has no such route (404); {how}") from error
        raise _error(f"{url}: {error.code} {error.reason}: {text}; its log says more") from error
    except OSError as error:  # URLError and timeouts are
        raise _error(f"{url}: {getattr(error, 'reason', error)}; does a server listen there?") from error
    except ValueError as error:
        raise _error(f"{url}: the reply is not JSON; is this a vLLM server?") from error


def _refuse_errors(answers: list[dict[str, Any]]) -> None:
    failed = [answer for answer in answers if "error" in answer]
    if failed:
        raise _error(f"rank {failed[0]['rank']}: {failed[0]['error']}")


# --- the table ---------------------------------------------------------------------------------------------


def render(answers: Sequence[dict[str, Any]]) -> str:
    """A table for each group of ranks that have the same one, with equal layers in one line."""
    tables: dict[str, list[dict[str, Any]]] = {}
    for answer in answers:
        lines = [
            (layer["name"], layer["class_name"], _kinds(layer["kinds"]), _way(layer["in_place"], layer["reason"]))
            for layer in fold(answer["layers"])
        ]
        tables.setdefault(_columns([("layer", "class", "parameters", "installed"), *lines]), []).append(answer)
    blocks = []
    for table, of in tables.items():
        first = of[0]
        ranks = _ranges([answer["rank"] for answer in of])
        digests = ", ".join(answer["digest"][:12] for answer in of)
        ways = [layer["in_place"] for layer in first["layers"]]
        counts = f"{ways.count(True)} in place, {ways.count(None)} once proved, {ways.count(False)} through the loader"
        blocks.append(
            f"rank {ranks} of {first['size']} ({first['device']}): {first['num_names']} names, plan {digests}\n"
            f"{len(ways)} layers: {counts}\n\n{table}"
        )
    for text, key in (("ignored by the loader", "ignored"), ("written by none of these names", "untouched")):
        everywhere = [name for name in answers[0][key] if all(name in answer[key] for answer in answers)]
        if everywhere:
            blocks.append(f"{text}, on every rank: {', '.join(fold_names(everywhere))}")
    return "\n\n".join(blocks)


def fold(layers: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """`layers`, where those that differ in numbers of their names alone are one, with ranges in their place.

    A layer's own numbers count as numbers of its name where its reason repeats them, too.
    """
    rows = [(layer["name"].split("."), dict(layer)) for layer in layers]
    depth = max((sum(part.isdigit() for part in parts) for parts, _ in rows), default=0)
    places = {id(row): [at for at, part in enumerate(parts) if part.isdigit()] for parts, row in rows}
    for level in range(1, depth + 1):  # the last number first
        groups: dict[str, list[tuple[list[str], dict[str, Any], int]]] = {}
        for parts, row in rows:
            at = places[id(row)][-level] if level <= len(places[id(row)]) else -1
            blank = parts if at < 0 else [*parts[:at], "*", *parts[at + 1 :]]
            facts = {**row, "name": blank, "reason": _without_numbers(row["reason"], row["name"])}
            groups.setdefault(json.dumps([at, facts], sort_keys=True), []).append((parts, row, at))
        rows = []
        for members in groups.values():
            parts, row, at = members[0]
            if len(members) > 1:
                numbers = _ranges([int(each[at]) for each, _, _ in members])
                parts = [*parts[:at], numbers, *parts[at + 1 :]]
                row["reason"] = _without_numbers(row["reason"], row["name"])
            rows.append((parts, row))
    return [{**row, "name": ".".join(parts)} for parts, row in rows]


def fold_names(names: Iterable[str]) -> list[str]:
    """`names`, where those that differ in numbers alone are one, with ranges in their place."""
    return [row["name"] for row in fold({"name": name, "reason": None} for name in names)]


def _without_numbers(reason: str | None, name: str) -> str | None:
    """`reason`, in which the numbered modules that layer `name` is in have stars for their numbers."""
    parts = name.split(".")
    for stop in range(len(parts), 0, -1):
        if reason is not None and parts[stop - 1].isdigit():
            blank = ["*" if part.isdigit() else part for part in parts[:stop]]
            reason = reason.replace(".".join([*parts[:stop], ""]), ".".join([*blank, ""]))
    return reason


def _ranges(numbers: Iterable[int]) -> str:
    """`0-3,5` for 0, 1, 2, 3 and 5."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def _kinds(kinds: dict[str, str]) -> str:
    """`weight, bias: contiguous` for two parameters of one kind."""
    by_kind: dict[str, list[str]] = {}
    for parameter, kind in kinds.items():
        by_kind.setdefault(kind, []).append(parameter)
    return "; ".join(f"{', '.join(parameters)}: {kind}" for kind, parameters in by_kind.items())


def _way(in_place: bool | None, reason: str | None) -> str:
    return {True: "in place", None: "in place once proved", False: f"loader: {reason}"}[in_place]


def _columns(lines: Sequence[tuple[str, ...]]) -> str:
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    widths[-1] = 0  # nothing follows it
    return "\n".join("  ".join(f"{cell:{width}}" for cell, width in zip(line, widths, strict=True)) for line in lines)


if __name__ == "__main__":
    main()
