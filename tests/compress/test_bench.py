"""`compress bench`: tiny models here, and guidellm's report from a stand-in program against a tiny server."""

import http.server
import json
import stat
import sys
import threading
from pathlib import Path

import pytest

from compress import bench
from compress.bench_endpoint import measure_endpoint, read_report, scenario
from compress.bench_local import measure_local
from compress.bench_options import Endpoint, Local, parse_bench
from compress.checkpoint import Checkpoint
from compress.errors import InputError
from compress.recipe import Stage
from compress.stages import Place, plan_stages, run_stage
from quant.loader import load_model

# a program that does what guidellm does: reads the scenario, sends each request, writes the times
PROGRAM = """#!{python}
import json, sys, time, urllib.request
assert sys.argv[1:3] == ["run", "--config"], sys.argv
spec = json.load(open(sys.argv[3]))["spec"]
count, backend = spec["constraints"][0]["count"], spec["backend"]
good, bad = [], []
for _ in range(count):
    start = time.time()
    headers = {{"Authorization": "Bearer " + backend.get("api_key", "")}}
    body = json.dumps({{"model": backend["model"], "max_tokens": spec["data"][0]["output_tokens"]}}).encode()
    request = urllib.request.Request(backend["target"] + "/v1/chat/completions", body, headers)
    try:
        tokens = json.load(urllib.request.urlopen(request))["tokens"]
    except OSError as error:
        bad.append({{"info": {{"error": str(error)}}}})
        continue
    times = {{"request_start": start, "first_token_iteration": start + 0.2,
              "last_token_iteration": start + 0.2 + 0.05 * (tokens - 1), "token_iterations": tokens}}
    good.append({{"info": {{"timings": times}}, "output_metrics": {{"total_tokens": tokens}},
                  "input_metrics": {{"total_tokens": spec["data"][0]["prompt_tokens"]}}}})
with open(spec["outputs"][0]["path"], "w") as file:
    json.dump({{"benchmarks": [{{"requests": {{"successful": good, "errored": bad, "incomplete": []}}}}]}}, file)
"""


class Server(http.server.BaseHTTPRequestHandler):
    """Answers with as many tokens as were asked for; a model named `broken` fails."""

    seen: list[tuple[str, str]] = []  # noqa: RUF012 -- shared by the handlers of one server on purpose

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.seen.append((asked["model"], self.headers["Authorization"]))
        self.send_response(500 if asked["model"] == "broken" else 200)
        self.end_headers()
        self.wfile.write(json.dumps({"tokens": asked["max_tokens"]}).encode())

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""


@pytest.fixture
def url():
    Server.seen.clear()
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}/v1"
        server.shutdown()


@pytest.fixture
def guidellm(tmp_path: Path) -> str:
    program = tmp_path / "guidellm"
    program.write_text(PROGRAM.format(python=sys.executable))
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return str(program)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "give one directory, or url=… model=… of a server (got 0 directories)"),
        (["a", "b"], "give one directory, or url=… model=… of a server (got 2 directories)"),
        (["a", "url=http://x"], "give either a directory or url=, not both (got 'a')"),
        (["a", "promt=3"], "option 'promt' is not known: did you mean 'prompt'?"),
        (["a", "prompt=0"], "prompt='0': input should be greater than or equal to 1"),
        (["url=http://x"], "model= is missing"),
        (["model=x"], "url= is missing"),
        (["url=x", "model=m"], "url='x' is no http:// or https:// address"),
        (["url=http://x", "model=m", "ttft=5"], "ttft='5' is not a time above 0: give it a unit, as in ttft=150ms or "),
        (
            ["url=http://x", "model=m", "baseline_url=http://x", "baseline_model=m"],
            "baseline_url and baseline_model name the same side as url and model",
        ),
    ],
    ids=["nothing", "two", "both", "key", "count", "no model", "no url", "address", "unit", "same"],
)
def test_words_that_are_wrong(words: list[str], message: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_bench(words)
    assert str(caught.value).startswith(message)


def test_words_as_they_are_meant() -> None:
    assert parse_bench(["out/fp8", "baseline=demo", "rounds=2"]) == Local(
        directory="out/fp8", baseline="demo", rounds=2
    )
    found = parse_bench(["url=http://x:8000", "model=m", "ttft=150ms", "tpot=50ms"])
    assert isinstance(found, Endpoint)
    assert (found.ttft, found.tpot) == (0.15, 0.05)


def quantized(source: Path, folder: Path, **stage: dict) -> Path:
    plan = plan_stages([Stage.model_validate(stage)], Checkpoint.open(source), Place(folder, 10**9))[0]
    run_stage(plan, load_model(source).model.device, lambda _: None)
    return plan.result.path


def test_a_variant_is_measured_on_both_paths_and_against_its_source(tiny: Path, tmp_path: Path, capsys) -> None:
    variant = quantized(tiny, tmp_path / "v", quantize={"format": "int8", "method": "rtn"})
    words = [str(variant), f"baseline={tiny}", "prompt=8", "output=4", "rounds=2", "device=cpu"]
    assert bench.show(words, as_json=True) == 0
    found = json.loads(capsys.readouterr().out)
    assert list(found["sides"]) == ["baseline", "variant, transformers", "variant, loader"]
    assert set(found["ratios"]) == {"variant, transformers", "variant, loader"}
    for side in found["sides"].values():
        assert side["requests"] == 2
        assert side["ttft"]["p50"] > 0
        assert side["tpot"]["p50"] > 0
        assert side["answer_tokens"]["mean"] == 4
    ratio = found["ratios"]["variant, loader"]["tpot"]
    assert ratio["lower"] <= ratio["estimate"] <= ratio["upper"]
    assert found["sides"]["variant, loader"]["bytes_on_disk"] < found["sides"]["baseline"]["bytes_on_disk"]
    assert found["definitions"]["tpot"].startswith("seconds per token after the first")


def test_the_table_says_what_was_measured(tiny: Path, capsys) -> None:
    assert bench.show([str(tiny), "prompt=8", "output=4", "rounds=1", "device=cpu"], as_json=False) == 0
    out = capsys.readouterr().out
    assert "TPOT = (last - first token) / (tokens - 1)" in out
    assert "transformers: the library's own loading and kernels, not an engine's" in out
    assert "over baseline" not in out


def test_an_emulated_cache_is_measured_by_our_loader_alone(tiny: Path, tmp_path: Path) -> None:
    variant = quantized(tiny, tmp_path / "v", kv_cache={"scheme": "int8"})
    options = Local(directory=str(variant), prompt=8, output=4, rounds=1, device="cpu")
    assert {side["path"] for side in measure_local(options).sides.values()} == {"loader"}
    with pytest.raises(InputError, match=r"^transformers does not compute .* as it is stored: leave path out"):
        measure_local(options.model_copy(update={"path": "transformers"}))


def test_what_is_longer_than_the_model_is_refused(tiny: Path) -> None:
    with pytest.raises(InputError, match="prompt=512 and output=4 are longer than the 512 positions"):
        measure_local(Local(directory=str(tiny), prompt=512, output=4, device="cpu"))


def test_a_server_is_measured_in_turns(url: str, guidellm: str, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    words = [f"url={url}", "model=small", "baseline_model=big", f"guidellm={guidellm}", "requests=2", "rounds=2"]
    assert bench.show([*words, "output=8", "ttft=250ms", "tpot=40ms"], as_json=True) == 0
    printed = capsys.readouterr().out
    found = json.loads(printed)
    assert [model for model, _ in Server.seen] == ["big"] * 2 + ["small"] * 4 + [
        "big"
    ] * 2  # baseline, variant, and back
    assert {key for _, key in Server.seen} == {"Bearer secret"}
    assert "secret" not in printed
    side = found["sides"]["variant"]
    assert side["requests"] == 4
    assert side["ttft"]["p50"] == pytest.approx(0.2, rel=1e-3)
    assert side["tpot"]["p50"] == pytest.approx(0.05, rel=1e-3)  # vLLM's, not (latency / tokens)
    assert side["goodput"] == 0  # every TPOT is above its target
    assert found["ratios"]["variant"]["tpot"]["estimate"] == pytest.approx(1, rel=1e-3)


def test_a_server_that_fails(url: str, guidellm: str) -> None:
    options = Endpoint(url=url, model="broken", guidellm=guidellm, requests=1, rounds=1)
    with pytest.raises(InputError, match=r"^no request to http://127\.0\.0\.1:\d+/v1 succeeded: HTTP Error 500"):
        measure_endpoint(options)


def test_guidellm_that_is_missing_or_fails(url: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"^'/no/guidellm' is not there: pip install 'compress-gate\[bench\]'"):
        measure_endpoint(Endpoint(url=url, model="m", guidellm="/no/guidellm"))
    program = tmp_path / "guidellm"
    program.write_text("#!/bin/sh\necho starting >&2\necho 'no such tokenizer' >&2\nexit 3\n")
    program.chmod(0o755)
    with pytest.raises(InputError, match=r"^guidellm ended with 3 against http://.*: no such tokenizer$"):
        measure_endpoint(Endpoint(url=url, model="m", guidellm=str(program)))


def test_a_report_of_another_version() -> None:
    with pytest.raises(InputError, match=r"^guidellm's report is not as version 0\.8 writes it \(KeyError"):
        read_report({"benchmarks": [{"request": {}}]}, "http://x")


def test_the_scenario_checks_certificates_and_names_the_server_once(tmp_path: Path) -> None:
    options = Endpoint(url="https://x/v1/", model="m", tokenizer="./dir")
    spec = scenario(options, (options.url, options.model), turn_output=tmp_path / "o.json")["spec"]
    assert spec["backend"] == {"kind": "openai_http", "target": "https://x", "model": "m", "verify": True}
    assert spec["tokenizer"]["model"] == "./dir"
