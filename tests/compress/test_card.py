"""The model card: merged into what is there, honest about the verdict, and safe against what comes from outside."""

import json
import re

import pytest
import yaml
from huggingface_hub import ModelCard

from compress.card import CardInput, model_card, read_card_input
from compress.engines import loads_in
from compress.errors import InputError

METRIC = {"id": "text", "kind": "log_perplexity", "data": "docs", "required": True, "n": 62, "baseline": 2.0,
          "variant": 2.01, "loss": 0.01, "lower": 0.005, "upper": 0.015, "margin": 0.0296, "verdict": "PASS",
          "reason": "why"}  # fmt: skip
GATE = {"verdict": "PASS", "exit_code": 0, "reason": "", "warnings": [], "alpha": 0.05, "metrics": [METRIC],
        "binds": {"variant_manifest": "aa" * 32}}  # fmt: skip
RUN = {"command": "compress run recipe=fp8.yaml", "source": "org/base", "output": "out", "bytes_before": 2_000_000,
       "bytes_after": 1_000_000}  # fmt: skip
LOCK = {"recipe": {"model": "org/base", "output": "out"}, "plan": {"data": {"docs": {"source": "wikitext"}}}}
FP8 = {"quantization_config": {"quant_method": "compressed-tensors", "format": "float-quantized"}}


def card_input(**fields):
    return CardInput(**{"gate": GATE, "run": RUN, "lock": LOCK, "config": FP8, "seal": "5ea1",
                        "base_model": "org/base"} | fields)  # fmt: skip


def parts(text):
    _, front, body = re.split(r"^---\n", text, maxsplit=2, flags=re.MULTILINE)
    return yaml.safe_load(front), body


def test_a_new_card_says_what_the_hub_and_people_need():
    front, body = parts(model_card(card_input(), "org/small", None))
    assert front == {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["compress-gate", "compressed-tensors", "float-quantized"],
        "base_model": "org/base",
        "base_model_relation": "quantized",
    }
    for line in (
        "**PASS: every required metric shows a loss below its margin.**",
        "Weights: 2.0 MB before, 1.0 MB after.",
        "| text | 62 | 7.389 ppl | 7.463 ppl | +1.01% | +0.50 to +1.51 | +3.00% | PASS |",
        'model = AutoModelForCausalLM.from_pretrained("org/small", device_map="auto")',
        "vllm serve org/small",
        "hf download org/small --local-dir model\ncompress verify model",
        f"Files: sha256 over the manifest `{'aa' * 32}`. Evidence: seal `5ea1`.",
        "```\ncompress run recipe=fp8.yaml\n```",
        "```\nmodel: org/base\noutput: out\n```",
    ):
        assert line in body
    assert "\n\n\n" not in body


def test_front_matter_is_carried_over_but_for_the_results_of_another_model():
    existing = yaml.safe_dump({"license": "apache-2.0", "language": ["en"], "tags": ["chat"], "base_model": "org/older",
                               "library_name": "peft", "model-index": [{"name": "base", "results": [1]}]})  # fmt: skip
    front, body = parts(model_card(card_input(), "org/small", f"---\n{existing}---\n# Base\n\nAbout the base.\n"))
    assert (front["license"], front["language"], front["library_name"]) == ("apache-2.0", ["en"], "peft")
    assert front["tags"] == ["chat", "compress-gate", "compressed-tensors", "float-quantized"]
    assert front["base_model"] == "org/base" and "model-index" not in front
    assert body.rstrip().endswith("<!-- compress: end -->\n\n# Base\n\nAbout the base.")


def test_a_second_card_replaces_our_section_and_nothing_else():
    first = model_card(card_input(), "org/small", "# Mine\n")
    edited = first.replace("<!-- compress: begin -->", "Above.\n\n<!-- compress: begin -->")
    second = model_card(card_input(seal="other"), "org/small", edited)
    assert second == edited.replace("5ea1", "other")
    assert model_card(card_input(), "org/small", first) == first


def test_a_tag_given_as_text_stays():
    front, _ = parts(model_card(card_input(), "org/small", "---\ntags: chat\n---\n"))
    assert front["tags"][0] == "chat"


@pytest.mark.parametrize("front", ["a: [", "- a\n- b"], ids=["broken", "list"])
def test_front_matter_that_cannot_be_read_is_an_input_error(front):
    with pytest.raises(InputError, match=r"^the front matter of README\.md "):
        model_card(card_input(), "org/small", f"---\n{front}\n---\n")


def test_a_source_without_a_hub_id_names_no_base():
    front, _ = parts(model_card(card_input(base_model=None), "org/small", "---\nbase_model: org/kept\n---\n"))
    assert front["base_model"] == "org/kept" and "base_model_relation" not in front


def whole(**data):
    return LOCK | {"plan": {"data": {"docs": {"source": "wikitext", **data}}}}


def test_results_are_metadata_only_for_a_whole_benchmark_that_passed():
    front, _ = parts(model_card(card_input(lock=whole(complete=62)), "org/small", None))
    assert front["model-index"] == [
        {
            "name": "org/small",
            "results": [
                {
                    "task": {"type": "text-generation"},
                    "dataset": {"name": "wikitext-2-raw-v1", "type": "Salesforce/wikitext"},
                    "metrics": [
                        {
                            "type": "log_perplexity",
                            "name": "text",
                            "value": 2.01,
                            "args": {"baseline": 2.0, "loss": 0.01, "lower": 0.005, "upper": 0.015, "margin": 0.0296,
                                     "n": 62},
                        }
                    ],
                }
            ],
        }
    ]  # fmt: skip


TASK = {"task": "gsm8k", "documents": 62, "dataset": "openai/gsm8k", "config": "main", "split": "test",
        "metric": "exact_match", "filter": "strict-match", "num_fewshot": 5}  # fmt: skip


def test_a_whole_task_of_the_harness_is_metadata_with_how_it_was_computed():
    front, _ = parts(model_card(card_input(run=RUN | {"tasks": {"docs": TASK}}), "org/small", None))
    [result] = front["model-index"][0]["results"]
    assert result["dataset"] == {"name": "gsm8k", "type": "openai/gsm8k", "config": "main", "split": "test"}
    args = result["metrics"][0]["args"]
    assert args["n"] == 62
    assert [args[key] for key in ("harness", "metric", "filter", "num_fewshot")] == [
        "lm-eval", "exact_match", "strict-match", 5]  # fmt: skip


def test_what_is_written_is_what_the_hubs_own_library_reads():
    text = model_card(card_input(lock=whole(complete=62), run=RUN | {"tasks": {"docs": TASK}}), "org/small", None)
    [found] = ModelCard(text).data.eval_results
    assert (found.dataset_type, found.metric_value, found.metric_args["n"]) == ("Salesforce/wikitext", 2.01, 62)


@pytest.mark.parametrize(
    ("task", "verdict"),
    [(TASK | {"documents": 63}, "PASS"), (TASK | {"dataset": ""}, "PASS"), (TASK, "FAIL"), (TASK, "WAIVED")],
    ids=["part of it", "local data", "not passed", "waived"],
)
def test_no_metadata_of_another_task(task, verdict):
    gate = GATE | {"verdict": verdict, "waivers": []}
    front, _ = parts(model_card(card_input(gate=gate, run=RUN | {"tasks": {"docs": task}}), "org/small", None))
    assert "model-index" not in front


@pytest.mark.parametrize(
    ("lock", "verdict"),
    [
        (whole(), "PASS"),
        (whole(complete=63), "PASS"),
        (whole(complete=62), "FAIL"),
        (whole(complete=62, source="mine.jsonl"), "PASS"),
    ],
    ids=["part of it", "stopped early", "not passed", "no benchmark"],
)
def test_no_metadata_otherwise(lock, verdict):
    front, _ = parts(model_card(card_input(lock=lock, gate=GATE | {"verdict": verdict}), "org/small", None))
    assert "model-index" not in front


def test_names_from_outside_are_no_markup():
    gate = GATE | {"metrics": [METRIC | {"id": "a|b](x)<img>"}]}
    run = RUN | {"command": "compress run a=```\n# x"}
    text = model_card(card_input(gate=gate, run=run), "org/small", None)
    assert "| a\\|b\\](x)\\<img\\> | 62 |" in text
    assert "````\ncompress run a=```\n# x\n````" in text


def test_a_waived_loss_is_a_banner_and_no_claim():
    waiver = {"metric": "text", "reason": "known", "by": "Ada", "until": "2027-01-01"}
    text = model_card(
        card_input(gate=GATE | {"verdict": "WAIVED", "reason": "r", "waivers": [waiver]}), "org/small", None
    )
    assert "> **WAIVED, not passed.**" in text and "confidence" not in text
    assert "> The loss of text was waived by Ada until 2027-01-01: known" in text


def test_the_input_is_read_from_a_run(make_run):
    directory, gate = make_run()
    found = read_card_input(directory, None)
    assert (found.gate, found.base_model, found.config) == (gate, None, {})
    assert found.lock["recipe"] == {"model": "demo", "gate": {"alpha": 0.05}}
    assert read_card_input(directory, "org/base").base_model == "org/base"


def test_a_fetched_source_is_the_base(make_run, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    directory, _ = make_run(run=RUN | {"stages": [], "seconds": 1.0})
    assert read_card_input(directory, None).base_model == "org/base"
    (tmp_path / "org" / "base").mkdir(parents=True)
    assert read_card_input(directory, None).base_model is None


def layout(name, **weights):
    group = {"targets": ["Linear"], "weights": weights}
    return {
        "quantization_config": {"quant_method": "compressed-tensors", "format": name, "config_groups": {"g": group}}
    }


@pytest.mark.parametrize(
    ("config", "engines"),
    [
        ({}, ("transformers", "vLLM")),
        (layout("float-quantized", num_bits=8), ("transformers", "vLLM")),
        (layout("pack-quantized", num_bits=4, symmetric=True), ("transformers", "vLLM")),
        (layout("pack-quantized", num_bits=4, symmetric=False), ("vLLM",)),
        (layout("nvfp4-pack-quantized", num_bits=4, strategy="tensor_group"), ("transformers", "vLLM")),
        (layout("nvfp4-pack-quantized", num_bits=4, strategy="tensor_group") | {"num_experts": 4}, ("vLLM",)),
        (layout("int-quantized", num_bits=8) | {"num_experts": 4}, ("vLLM",)),
        (layout("float-quantized", num_bits=8, strategy="block") | {"num_experts": 4}, ("vLLM",)),
        (layout("float-quantized", num_bits=8, strategy="channel") | {"num_experts": 4}, ("transformers", "vLLM")),
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, ("transformers",)),
        ({"quantization_config": {"quant_method": "new"}}, ()),
        (layout("new"), ()),
    ],
    ids=["bf16", "fp8", "int4", "int4-asymmetric", "nvfp4", "nvfp4-experts", "int8-experts", "fp8-block-experts",
         "fp8-experts", "bitsandbytes", "unknown", "no layout"],
)  # fmt: skip
def test_snippets_only_for_engines_that_load_it(config, engines):
    assert loads_in(json.loads(json.dumps(config))) == engines
    text = model_card(card_input(config=config), "org/small", None)
    assert ("from_pretrained" in text, "vllm serve" in text) == ("transformers" in engines, "vLLM" in engines)
