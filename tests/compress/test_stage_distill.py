"""The distill stage between checkpoints: what it reads, what it writes, what it refuses."""

import json
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from compress.checkpoint import Checkpoint
from compress.errors import InputError, RecipeError, Refused
from compress.recipe import Stage
from compress.stage_distill import check_memory
from compress.stage_plan import Place
from compress.stages import plan_stages, run_stage
from evals.samples import load_samples
from quant.format import quantize as pack
from quant.formats import make_format
from quant.loader import load_model

TRAINING = {"steps": 6, "batch": 4, "micro_batch": 2, "length": 32, "learning_rate": 0.002}
OPTIONS = {"training": TRAINING, "held_out": 4, "evaluate_every": 3}


def damage(source, directory, noise=0.02, part=""):
    """A copy with noise in every matrix that has `part` in its name."""
    shutil.copytree(source, directory)
    generator = torch.Generator().manual_seed(5)
    tensors = load_file(source / "model.safetensors")
    for name, tensor in tensors.items():
        if tensor.ndim > 1 and part in name:
            tensor += noise * torch.randn(tensor.shape, generator=generator).to(tensor.dtype)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


@pytest.fixture
def student(tiny_models, tmp_path):
    return damage(tiny_models("llama"), tmp_path / "student")


def distil(source, folder, teacher, evaluated=(), **options):
    stage = Stage.model_validate({"distill": {**OPTIONS, "teacher": str(teacher), **options}})
    (plan,) = plan_stages([stage], Checkpoint.open(source), Place(folder, 10**9, evaluated))
    return plan, run_stage(plan, torch.device("cpu"), lambda _: None)


def sets(source):
    """What the recipe below evaluates."""
    return [load_samples("text", kind="documents", source=source, count=20, seed=1234)]


def logits(directory):
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    return model(torch.arange(5, 60)[None]).logits.log_softmax(-1)


@pytest.mark.parametrize("kind", ["llama", "qwen3-moe"])
def test_a_checkpoint_like_the_input_that_is_closer_to_the_teacher(tiny_models, tmp_path, kind):
    teacher, student = tiny_models(kind), damage(tiny_models(kind), tmp_path / "student")
    plan, report = distil(student, tmp_path / "run", teacher)
    before, after = Checkpoint.open(student), Checkpoint.open(plan.result.path)
    assert {name: info.spec for name, info in after.tensors.items()} == {
        name: info.spec for name, info in before.tensors.items()
    }
    assert after.config == before.config and (plan.result.path / "tokenizer.json").exists()
    changed = [name for name in after.tensors if not torch.equal(after.read(name), before.read(name))]
    assert len(changed) > 0.5 * len(after.tensors)
    wanted = logits(teacher)
    kl = [(wanted.exp() * (wanted - logits(path))).sum(-1).mean().item() for path in (student, plan.result.path)]
    assert kl[1] < 0.9 * kl[0]
    assert [entry["step"] for entry in report["curve"]] == [0, 3, 6] and report["best"]["step"] == 6
    assert "loss" not in report["curve"][0] and report["curve"][2]["loss"] < report["curve"][1]["loss"]
    assert report["tokens"] <= 6 * 4 * 31 and not list((tmp_path / "run").glob("*.journal"))


def test_training_on_what_the_teacher_writes(student, tiny_models, tmp_path):
    _, report = distil(student, tmp_path / "run", tiny_models("llama"), data="self", sampled=12)
    assert report["curve"][-1]["kl"] < report["curve"][0]["kl"] and report["tokens"] == 6 * 4 * 31


def test_of_a_chat_only_the_answer_is_learnt(student, tiny_models, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(student)
    tokenizer.chat_template = (
        "{% for m in messages %}<s>{{ m.role }}\n{{ m.content }}</s>\n{% endfor %}"
        "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
    )
    tokenizer.save_pretrained(student)
    data = {"documents": {}, "problems": {"arithmetic": 1}}
    _, report = distil(student, tmp_path / "run", tiny_models("llama"), data=data)
    assert 0.5 * 6 * 4 * 31 < report["tokens"] < 0.9 * 6 * 4 * 31


def test_nothing_that_is_evaluated_is_learnt(student, tiny_models, tmp_path):
    everything = load_samples("text", kind="documents", source="python-docs")
    with pytest.raises(InputError, match="every text of 'python-docs' is evaluated, none is left to learn from"):
        distil(student, tmp_path / "run", tiny_models("llama"), [everything])


def test_another_tokenizer_is_refused(student, tiny_models, tmp_path):
    other = shutil.copytree(tiny_models("llama"), tmp_path / "other")
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    message = "student and teacher differ in encoding of a sample text, vocabulary: their ids do not compare"
    with pytest.raises(Refused, match=re.escape(message)):
        distil(student, tmp_path / "run", other)


def test_learning_from_oneself_is_refused(tiny_models, tmp_path):
    with pytest.raises(RecipeError, match="the student is the teacher itself: put distill after prune"):
        distil(tiny_models("llama"), tmp_path, "source")


def test_a_quantized_student_is_refused(tiny_models, tmp_path):
    stages = [{"quantize": {"format": "fp8"}}, {"distill": OPTIONS}]
    with pytest.raises(RecipeError, match="distill trains 16-bit weights, so it stands before quantize"):
        plan_stages(
            [Stage.model_validate(stage) for stage in stages],
            Checkpoint.open(tiny_models("llama")),
            Place(tmp_path, 10**9),
        )


def test_what_does_not_fit_into_memory_is_refused(tiny_models, monkeypatch):
    monkeypatch.setattr("psutil.virtual_memory", lambda: type("Memory", (), {"total": 10**6}))
    checkpoint = Checkpoint.open(tiny_models("llama"))
    with pytest.raises(InputError, match=r"takes 0\.0 GB before activations, 0\.0 GB are here: set distill\.top_k, or"):
        check_memory(checkpoint, checkpoint)


def test_a_run_that_is_killed_goes_on_to_the_same_report(student, tiny_models, tmp_path):
    options = {"training": {**TRAINING, "steps": 15}, "evaluate_every": 5}
    _, whole = distil(student, tmp_path / "whole", tiny_models("llama"), sets("python-docs"), **options)
    training = {"distill": {**OPTIONS, **options, "teacher": str(tiny_models("llama"))}}
    recipe = {
        "model": str(student),
        "output": "out/distilled",
        "device": "cpu",
        "stages": [training, {"quantize": {"format": "int8", "method": "rtn"}}],
        "evals": {"documents": {"text": {"source": "python-docs", "count": 20, "max_tokens": 24}}},
        "gate": {
            "aa_samples": 2,
            "stages": True,
            "metrics": {"text": {"kind": "log_perplexity", "max_increase": "50%"}},
        },
    }
    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe))
    command = [sys.executable, "-m", "compress", "run", "recipe=recipe.yaml"]
    killed = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.DEVNULL)
    staging = tmp_path / "out/.distilled.staging"
    while killed.poll() is None and not list(staging.glob("0-distill.journal/*/state-000005/progress.json")):
        time.sleep(0.01)
    killed.kill()
    assert killed.wait() == -signal.SIGKILL and not (tmp_path / "out/distilled").exists()
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr + done.stdout
    assert "step 15 of 15: " in done.stderr and " tokens/s, loss " in done.stderr
    assert "step 5 of 15: " not in done.stderr  # it went on from there
    evidence = tmp_path / "out/distilled/evidence"
    run, gate = (json.loads((evidence / name).read_text()) for name in ("run.json", "gate.json"))
    assert run["stages"][0]["report"]["curve"] == whole["curve"]
    first, last = (stage["metrics"][0] for stage in run["waterfall"])
    assert last["loss"] == gate["metrics"][0]["loss"] != first["loss"] and first["kind"] == "log_perplexity"
    assert "## Training: distil from" in (evidence / "report.md").read_text()
    assert "Loss added by each stage" in (evidence / "report.html").read_text()


@pytest.mark.parametrize(
    "quantize",
    [{"format": "int4", "group_size": 64}, {"format": "fp8"}, {"format": "mxfp4"}, {"format": "int8"}],
    ids=lambda options: options["format"],
)
def test_training_under_rounding_ends_in_the_formats_own_bytes(student, tiny_models, tmp_path, monkeypatch, quantize):
    """What the quantize stage writes is to the bit what the student computed with when it was at its best."""
    import quant.fake as fake

    computed, plain = {}, fake.plain_weights

    def noted(model):
        linears = {name: part for name, part in model.named_modules() if isinstance(part, torch.nn.Linear)}
        computed.update({name: linear.weight.detach().clone() for name, linear in linears.items() if name != "lm_head"})
        plain(model)

    monkeypatch.setattr(fake, "plain_weights", noted)
    options = {**OPTIONS, "teacher": str(tiny_models("llama")), "quantized": True}
    stages = [{"distill": options}, {"quantize": {**quantize, "method": "rtn"}}]
    plans = plan_stages(
        [Stage.model_validate(stage) for stage in stages], Checkpoint.open(student), Place(tmp_path / "run", 10**9)
    )
    report, _ = [run_stage(plan, torch.device("cpu"), lambda _: None) for plan in plans]
    trained, written = (Checkpoint.open(plan.result.path) for plan in plans)
    fmt = make_format(quantize["format"], **{key: value for key, value in quantize.items() if key != "format"})
    for name in computed:
        for suffix, tensor in pack(trained.read(f"{name}.weight"), fmt).items():
            assert torch.equal(written.read(f"{name}.{suffix}").view(torch.uint8), tensor.view(torch.uint8)), name
    loaded = load_model(plans[-1].result.path).model
    parts = dict(loaded.named_modules())
    assert len(computed) == 14 and all(torch.equal(parts[name].weight, seen) for name, seen in computed.items())
    wanted, found = logits(tiny_models("llama")), loaded(torch.arange(5, 60)[None]).logits.log_softmax(-1)
    kl = [(wanted.exp() * (wanted - each)).sum(-1).mean().item() for each in (logits(student), found)]
    assert report["curve"][-1]["kl"] < report["curve"][0]["kl"] and kl[1] < 1.5 * kl[0]


def test_training_under_rounding_needs_the_stage_that_rounds(student, tiny_models, tmp_path):
    with pytest.raises(RecipeError, match=r"distill\.quantized needs a stage quantize with method rtn right after it"):
        distil(student, tmp_path, tiny_models("llama"), quantized=True)


def test_a_teacher_that_was_asked_beforehand(student, tiny_models, tmp_path):
    _, there = distil(student, tmp_path / "there", tiny_models("llama"))
    plan, gone = distil(student, tmp_path / "gone", tiny_models("llama"), top_k=128)
    assert [entry["kl"] for entry in gone["curve"]] == pytest.approx(
        [entry["kl"] for entry in there["curve"]], rel=1e-4
    )
    assert gone["top_k"] == 128 and plan.result.path.exists() and not list((tmp_path / "gone").glob("*.journal"))
    _, few = distil(student, tmp_path / "few", tiny_models("llama"), top_k=8)
    assert few["curve"][-1]["kl"] < few["curve"][0]["kl"] < there["curve"][0]["kl"]


def test_more_ids_than_the_vocabulary_has_are_refused(student, tiny_models, tmp_path):
    with pytest.raises(RecipeError, match=r"distill\.top_k is 129, but the vocabulary has 128 tokens: say fewer"):
        distil(student, tmp_path, tiny_models("llama"), top_k=129)


def test_a_teacher_that_was_asked_needs_less_memory(tiny_models):
    checkpoint = Checkpoint.open(tiny_models("llama"))
    together, apart = (check_memory(checkpoint, checkpoint, together=value) for value in (True, False))
    assert together == apart * 5 // 4
