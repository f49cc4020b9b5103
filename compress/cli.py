"""The command line. Each command parses its words, calls one function, and ends with an exit code of the table below.

0 pass   1 crash   2 recipe, usage or input error   3 gate failed   4 inconclusive   5 refused   6 push failed
130 interrupted
"""

import json
import signal
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from typer import Argument, Option

from compress.errors import OS_ERRORS, CompressError, InputError, RecipeError
from compress.progress import console

__all__ = ["app", "main"]

EXIT_CODES = """\b
Exit codes: 0 pass · 1 crash · 2 recipe, usage or input error · 3 gate failed · 4 inconclusive · 5 refused
(evidence invalid or not comparable) · 6 push failed · 130 interrupted"""
app = typer.Typer(
    name="compress",
    help="Make a language model smaller, measure what that lost on the bytes that ship, and block what lost too much.",
    epilog=EXIT_CODES,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
Words = Annotated[
    list[str], Argument(metavar="recipe=FILE [key=value ...]", help="a recipe and dotted overrides of its keys")
]
Output = Annotated[Path, Argument(help="the output of a run")]
Accept = Annotated[bool, Option("--accept-waivers", help="end with 0 where every loss that blocks is waived")]
Json = Annotated[bool, Option("--json", help="print the result as JSON on standard output")]
INTERRUPTED = "interrupted; nothing half written was left behind, run the same command to continue"


@app.command()
def run(
    words: Words,
    dry_run: Annotated[bool, Option("--dry-run", help="show what would be done, from headers alone")] = False,
    overwrite: Annotated[bool, Option("--overwrite", help="replace the output of an earlier run")] = False,
    accept_waivers: Accept = False,
    as_json: Json = False,
) -> None:
    """Compress a model as a recipe says, measure the loss, and publish the result only if the gate passes.

    \b
    compress run recipe=fp8.yaml
    compress run recipe=int4.yaml model=ORG/NAME output=out/int4 gate.metrics.text.max_increase=2%
    compress run recipe=fp8.yaml stages.0.quantize.strategy=tensor --dry-run
    """
    from compress import pipeline
    from compress.ranks import among_ranks

    def whole() -> int:
        recipe, overrides = _recipe_words(words)
        return pipeline.run(
            recipe, overrides, dry_run=dry_run, overwrite=overwrite, accept_waivers=accept_waivers, as_json=as_json
        )

    raise typer.Exit(among_ranks(whole))


@app.command()
def gate(
    baseline: Annotated[str, Argument(help="the checkpoint that is the measure: directory, .gguf, hub id, or demo")],
    variant: Annotated[str, Argument(help="the checkpoint that is judged: ours or any other tool's")],
    words: Words,
    overwrite: Annotated[bool, Option("--overwrite", help="replace the evidence of an earlier run")] = False,
    accept_waivers: Accept = False,
    as_json: Json = False,
) -> None:
    """Judge any two checkpoints by the evals and the gate of a recipe; evidence is written into the variant.

    \b
    compress gate ORG/BASE ./variant recipe=fp8.yaml
    """
    from compress import gate_command

    code = gate_command.gate(
        (baseline, variant),
        _recipe_words(words),
        overwrite=overwrite,
        accept_waivers=accept_waivers,
        as_json=as_json,
    )
    raise typer.Exit(code)


@app.command()
def selftest(words: Words, as_json: Json = False) -> None:
    """Prove the gate on the recipe's model: itself must PASS, a damaged copy FAIL, a copy with NaN be REFUSED."""
    from compress import selftest as module

    recipe, overrides = _recipe_words(words)
    raise typer.Exit(module.selftest(recipe, overrides, as_json=as_json))


@app.command()
def verify(
    directory: Output,
    public_key: Annotated[
        Path | None, Option("--public-key", help="the evidence must be signed with the other half of this key (PEM)")
    ] = None,
    accept_waivers: Accept = False,
    as_json: Json = False,
) -> None:
    """Recompute hashes and the verdict from the stored evidence; needs no model and no network."""
    from compress import verify as module

    code = module.show(directory, public_key=public_key, accept_waivers=accept_waivers, as_json=as_json)
    raise typer.Exit(code)


@app.command()
def push(
    directory: Output,
    words: Annotated[
        list[str],
        Argument(
            metavar="repo=ORG/NAME [key=value ...]",
            help="where to, and private=true|false, revision=BRANCH, create_pr=true, base_model=ORG/NAME",
        ),
    ],
    accept_waivers: Accept = False,
    as_json: Json = False,
) -> None:
    """Publish what passed on the hub: card, weights, evidence; the branch moves only if the hub holds the same bytes.

    \b
    compress push out/fp8 repo=ORG/NAME
    compress push out/fp8 repo=ORG/NAME create_pr=true
    """
    from compress import push as module
    from compress.push_options import parse_push

    raise typer.Exit(module.show(directory, parse_push(words), accept_waivers=accept_waivers, as_json=as_json))


@app.command()
def sign(
    directory: Output,
    words: Annotated[list[str], Argument(metavar="key=FILE", help="your private key in PEM form: Ed25519 or P-256")],
    as_json: Json = False,
) -> None:
    """Sign the statement of the verdict with a key of your own, offline; check it with verify --public-key."""
    from compress import sign as module

    raise typer.Exit(module.show(directory, _pairs(words), as_json=as_json))


@app.command()
def compare(
    directories: Annotated[list[Path], Argument(help="outputs of runs from one source")],
    page: Annotated[Path, Option("--page", help="where to write the page")] = Path("compare.html"),
    as_json: Json = False,
) -> None:
    """Show several variants of one source side by side: a table here, and a page with the picture of size and loss."""
    from compress import compare as module

    raise typer.Exit(module.show(directories, page, as_json=as_json))


@app.command()
def plan(
    model: Annotated[str, Argument(help="directory, config.json, or hub id")],
    words: Annotated[
        list[str], Argument(metavar="gpu=NAME users=N context=N [key=value ...]", help="what to plan for")
    ],
    picture: Annotated[Path | None, Option("--picture", help="draw users against context to a .png or .svg")] = None,
    as_json: Json = False,
) -> None:
    """Plan capacity: which format and KV cache fit a GPU, for how many users, how fast; reads headers only.

    \b
    compress plan ORG/NAME gpu=H100-80GB users=160 context=4096
    compress plan ./dir gpu=L40S users=20 context=8k kv=bf16,fp8 ttft=150ms tpot=50ms
    """
    from compress import planner

    report = planner.run_plan(model, _pairs(words))
    if picture is not None:
        planner.draw(report, picture)
    if as_json:
        print(json.dumps(planner.as_json(report), indent=2))
    else:
        planner.print_plan(report, Console(highlight=False))


@app.command()
def bench(
    words: Annotated[
        list[str],
        Argument(metavar="DIR|url=URL [key=value ...]", help="a checkpoint with baseline=DIR, or a server with model="),
    ],
    as_json: Json = False,
) -> None:
    """Measure prefill and decode of a checkpoint here, or of an OpenAI-compatible server, source against variant.

    \b
    compress bench out/fp8 baseline=demo prompt=512 output=64
    compress bench url=http://localhost:8000 model=out/fp8 baseline_url=http://localhost:8001 baseline_model=ORG/NAME
    """
    from compress import bench as module

    raise typer.Exit(module.show(words, as_json=as_json))


@app.command()
def inspect(
    directory: Annotated[str, Argument(help="a checkpoint: directory, .gguf, hub id, or demo")],
    as_json: Json = False,
) -> None:
    """Show the format, bits per weight and bytes of each layer group, from headers alone."""
    from compress import inspection

    inspection.show(directory, as_json=as_json)


@app.command("list")
def list_(what: Annotated[str, Argument(help="recipes, formats, kv or tasks")], as_json: Json = False) -> None:
    """List the shipped recipes, the formats or KV-cache schemes with their options, or the data and tasks."""
    from compress import listing

    listing.show(what, as_json=as_json)


def _pairs(words: list[str]) -> dict[str, str]:
    """key=value words as a mapping.

    Raises:
        InputError: a word without `=`.
    """
    bare = [word for word in words if "=" not in word]
    if bare:
        raise InputError(f"{bare[0]!r} is not of the form key=value")
    return {key: value for key, _, value in (word.partition("=") for word in words)}


def _recipe_words(words: list[str]) -> tuple[str, list[str]]:
    """Split `recipe=NAME` from the overrides.

    Raises:
        RecipeError: no recipe, two of them, or a word without `=`.
    """
    recipes = [word.removeprefix("recipe=") for word in words if word.startswith("recipe=")]
    overrides = [word for word in words if not word.startswith("recipe=")]
    bare = [word for word in overrides if "=" not in word]
    if bare:
        hint = f"recipe={bare[0]}" if not recipes else f"{bare[0]}=VALUE"
        raise RecipeError(f"{bare[0]!r} is not of the form key=value: did you mean {hint}?")
    if len(recipes) != 1:
        raise RecipeError(f"give one recipe, for example recipe=fp8.yaml (got {len(recipes)})")
    return recipes[0], overrides


def main() -> None:
    """Entry point: the only place where errors become sentences and exit codes.

    A pipeline that stops us (SIGTERM) is taken like Ctrl-C, so that nothing half written and no worker is left.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(_exit_code())


def _exit_code() -> int:
    try:
        code = int(app(standalone_mode=False) or 0)
        return _report(INTERRUPTED, code) if code == 130 else code  # the parser turns Ctrl-C into this code
    except CompressError as error:
        return _report(str(error), error.exit_code)
    except OSError as error:
        if error.errno not in OS_ERRORS:
            raise
        return _report(f"{OS_ERRORS[error.errno]} ({error.filename or error.strerror})", InputError.exit_code)
    except typer.TyperException as error:  # the command line's own mistakes: unknown command, missing argument
        message = error.format_message()
        if message.startswith("Usage:"):  # no words at all: the help is the answer
            console.print(message, markup=False)
            return InputError.exit_code
        return _report(message, InputError.exit_code)


def _report(sentence: str, code: int) -> int:
    console.print("[bold red]error:[/bold red]", end=" ")
    console.print(sentence, markup=False, soft_wrap=True)
    return code
