"""A server's figures through guidellm, a subprocess in whatever environment it is installed in.

guidellm sends synthetic prompts of a fixed length at a fixed concurrency and keeps when each request was sent and when
its tokens came. Only those raw times are taken from its report: what it calls TPOT is not what vLLM calls so. It reads
the request from a file, so that a key (OPENAI_API_KEY) never stands on a command line; the server's certificate is
checked, which guidellm leaves off by default.

Left out: starting servers, and any load that does not come from a fixed number of streams.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from compress.bench_options import Endpoint
from compress.errors import InputError
from compress.progress import say
from evals.serving import Round, Timed

__all__ = ["measure_endpoint", "read_report", "scenario"]

Side = tuple[str, str]  # base URL, model


def measure_endpoint(options: Endpoint) -> dict[str, list[Round]]:
    """The rounds of baseline (if there is one) and variant, in turns, by what they are called.

    Raises:
        InputError: guidellm is missing or failed, or no request succeeded.
    """
    program = _program(options.guidellm)
    sides = _sides(options)
    rounds: dict[str, list[Round]] = {name: [] for name in sides}
    for turn in range(options.rounds):
        order = list(sides) if turn % 2 == 0 else list(reversed(sides))
        for name in order:
            say(f"round {turn + 1} of {options.rounds}: {name}")
            rounds[name].append(_run(program, options, sides[name]))
    return rounds


def _sides(options: Endpoint) -> dict[str, Side]:
    """Baseline first. What the variant has in common with it, it need not repeat."""
    found = {}
    if options.baseline_url or options.baseline_model:
        found["baseline"] = options.baseline_url or options.url, options.baseline_model or options.model
    return {**found, "variant": (options.url, options.model)}


def scenario(options: Endpoint, side: Side, *, turn_output: Path) -> dict[str, Any]:
    """guidellm's scenario file of one turn."""
    url, model = side
    key = os.environ.get("OPENAI_API_KEY")
    backend = {"kind": "openai_http", "target": url.rstrip("/").removesuffix("/v1"), "model": model, "verify": True}
    data = {"kind": "synthetic_text", "prompt_tokens": options.prompt, "output_tokens": options.output}
    return {
        "metadata": {"name": "compress bench"},
        "spec": {
            "backend": backend | ({"api_key": key} if key else {}),
            "profile": {"kind": "concurrent", "streams": [options.concurrency]},
            "constraints": [{"kind": "max_requests", "count": options.requests}],
            "tokenizer": {"kind": "hf_auto", "model": options.tokenizer or model},
            "data": [data],
            "outputs": [{"kind": "json", "path": str(turn_output)}],
        },
    }


def _run(program: str, options: Endpoint, side: Side) -> Round:
    with tempfile.TemporaryDirectory(prefix="compress-bench.") as folder:  # readable by its owner alone
        request, output = Path(folder) / "scenario.json", Path(folder) / "report.json"
        request.write_text(json.dumps(scenario(options, side, turn_output=output)), encoding="utf-8")
        command = [program, "run", "--config", str(request), "--disable-console"]
        done = subprocess.run(command, check=False, capture_output=True, text=True, stdin=subprocess.DEVNULL)
        if done.returncode or not output.is_file():
            said = (done.stderr.strip() or done.stdout.strip() or "it said nothing").splitlines()[-1]
            raise InputError(f"guidellm ended with {done.returncode} against {side[0]}: {said}")
        return read_report(json.loads(output.read_text(encoding="utf-8")), side[0])


def read_report(report: Mapping[str, Any], url: str) -> Round:
    """The requests in guidellm's report.

    Raises:
        InputError: none succeeded, or the report is not of the kind that is read (guidellm 0.8).
    """
    try:
        requests = report["benchmarks"][0]["requests"]
        found = tuple(_timed(request) for request in requests["successful"])
        failed = requests["errored"]
        reason = failed[0]["info"]["error"] if failed else "the server gave no answer"
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise InputError(
            f"guidellm's report is not as version 0.8 writes it ({error!r}): install guidellm 0.8"
        ) from error
    if not found:
        raise InputError(f"no request to {url} succeeded: {reason}")
    return Round(found, len(failed))


def _timed(request: Mapping[str, Any]) -> Timed:
    times = request["info"]["timings"]
    tokens = request["output_metrics"]["total_tokens"] or times["token_iterations"]
    prompt = request["input_metrics"]["total_tokens"] or 0
    return Timed(
        times["request_start"], times["first_token_iteration"], times["last_token_iteration"], int(tokens), int(prompt)
    )


def _program(name: str) -> str:
    """Beside the Python that runs, else on the PATH, else a path."""
    found = shutil.which(name, path=str(Path(sys.executable).parent)) or shutil.which(name)
    if found is None:
        raise InputError(
            f"{name!r} is not there: pip install 'compress-gate[bench]', or guidellm in an environment of its own and "
            "guidellm=PATH/bin/guidellm"
        )
    return found
