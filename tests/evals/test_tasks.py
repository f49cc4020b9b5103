"""lm-eval tasks from a local YAML file and a tiny model, against likelihoods taken by hand; and what goes wrong."""

import copy
import hashlib
import json
import math
import os

import pytest
import torch
import yaml

from compress.errors import InputError, Refused
from evals.task_files import check_task, task_names, task_parts, write_bound
from evals.tasks import TaskOptions, run_task

CHOICE = {
    "task": "tiny_choice",
    "dataset_path": "json",
    "dataset_kwargs": {"data_files": {"test": "items.jsonl"}},
    "output_type": "multiple_choice",
    "test_split": "test",
    "doc_to_text": "Q: {{question}}\nA:",
    "doc_to_choice": "{{choices}}",
    "doc_to_target": "label",
    "metric_list": [
        {"metric": "acc", "aggregation": "mean", "higher_is_better": True},
        {"metric": "brier_score", "aggregation": "brier_score", "higher_is_better": False},
    ],
}
WRITE = {
    "task": "tiny_write",
    "dataset_path": "json",
    "dataset_kwargs": {"data_files": {"test": "items.jsonl"}},
    "output_type": "generate_until",
    "test_split": "test",
    "doc_to_text": "{{question}}",
    "doc_to_target": "{{answer}}",
    "generation_kwargs": {"until": ["\n"], "max_gen_toks": 6, "do_sample": False},
    "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    "filter_list": [
        {"name": "whole", "filter": [{"function": "take_first"}]},
        {"name": "first", "filter": [{"function": "regex", "regex_pattern": "(.)"}, {"function": "take_first"}]},
    ],
}
ITEMS = [
    {"question": f"{a} plus {b}", "choices": [str(a + b + k) for k in range(3)], "label": 0, "answer": str(a + b)}
    for a in range(1, 5)
    for b in range(1, 4)
]


@pytest.fixture
def write_task(tmp_path):
    """Write a task and its items; returns the path of the YAML."""

    def write(config, items=ITEMS, name="task.yaml"):
        (tmp_path / "items.jsonl").write_text("".join(json.dumps(item) + "\n" for item in items), encoding="utf-8")
        (tmp_path / name).write_text(yaml.safe_dump(config), encoding="utf-8")
        return str(tmp_path / name)

    return write


@pytest.fixture
def run(model, tokenizer, tmp_path):
    def run(source, *, on=model, **options):
        options = {"max_length": 64, "count": 5, "seed": 3, **options}
        return run_task(on, tokenizer, TaskOptions(source, **options), folder=tmp_path / "cache")

    return run


def test_scores_say_what_they_are_a_figure_of(run, write_task):
    assert run(write_task(CHOICE | {"num_fewshot": 0})).what == {
        "task": "tiny_choice", "documents": 12, "dataset": "", "config": None, "split": "test", "metric": "acc",
        "filter": "none", "num_fewshot": 0}  # fmt: skip


@torch.no_grad()
def likelihood(model, tokenizer, context, continuation):
    ids = tokenizer(context + continuation)["input_ids"]
    start = len(tokenizer(context)["input_ids"])
    log_p = model(torch.tensor([ids[:-1]])).logits[0].double().log_softmax(-1)
    return sum(float(log_p[i - 1, ids[i]]) for i in range(start, len(ids)))


def test_multiple_choice_is_the_likeliest_continuation(write_task, run, model, tokenizer):
    found = run(write_task(CHOICE), count=None)
    expected = {}
    for i, item in enumerate(ITEMS):
        context = f"Q: {item['question']}\nA:"
        values = [likelihood(model, tokenizer, context, f" {choice}") for choice in item["choices"]]
        expected[f"tiny_choice/{i}"] = float(max(range(3), key=values.__getitem__) == item["label"])
    assert {row["id"]: row["score"] for row in found.rows} == expected
    assert 0 < sum(expected.values()) < len(ITEMS)  # or the comparison says little
    assert found.figures["acc,none"] == pytest.approx(sum(expected.values()) / len(ITEMS))
    assert all(row["gen_capped"] is None and row["text"] is None for row in found.rows)


def test_rows_are_a_seeded_permutation_whose_prefixes_agree(write_task, run):
    source = write_task(CHOICE)
    key = {i: hashlib.sha256(f"3:tiny_choice/{i}".encode()).digest() for i in range(len(ITEMS))}
    ids = [f"tiny_choice/{i}" for i in sorted(key, key=key.__getitem__)]
    five, eight = run(source, count=5), run(source, count=8)
    assert [row["id"] for row in eight.rows] == ids[:8]
    assert five.rows == eight.rows[:5]
    assert len({row["hash"] for row in eight.rows}) == 8


def test_progress_is_told_in_documents(write_task, model, tokenizer, tmp_path):
    seen = []
    options = TaskOptions(write_task(CHOICE), batch_size=1, max_length=64)
    run_task(model, tokenizer, options, folder=tmp_path / "cache", advance=seen.append)
    assert len(seen) > 1 and sum(seen) == pytest.approx(len(ITEMS), abs=1)


def test_generation_through_the_declared_filter(write_task, run, model, tokenizer):
    source = write_task(WRITE)
    found = run(source, metric="exact_match", filter="whole", count=3)
    items = {f"tiny_write/{i}": item for i, item in enumerate(ITEMS)}
    for row in found.rows:
        ids = tokenizer(items[row["id"]]["question"], return_tensors="pt")["input_ids"]
        out = model.generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=2)[0, ids.shape[1] :]
        assert row["text"] == tokenizer.decode(out, skip_special_tokens=True).split("\n")[0]
        assert row["score"] == float(row["text"] == items[row["id"]]["answer"])
    assert set(found.figures) == {"exact_match,whole", "exact_match,first"}


def test_a_generation_at_its_limit_is_marked(write_task, run):
    rows = run(write_task(WRITE), metric="exact_match", filter="whole", count=3, max_new_tokens=1).rows
    assert [row["gen_capped"] for row in rows] == [len(row["text"]) == 1 for row in rows]
    assert any(row["gen_capped"] for row in rows)


def test_new_bytes_under_an_old_path_and_time_are_seen(write_task, run, tmp_path):
    source = write_task(CHOICE)
    before = run(source)
    times = (tmp_path / "items.jsonl").stat()
    write_task(CHOICE, [{**item, "question": item["question"].replace("plus", "PLUS")} for item in ITEMS])
    os.utime(tmp_path / "items.jsonl", ns=(times.st_atime_ns, times.st_mtime_ns))
    after = run(source)
    assert [row["id"] for row in after.rows] == [row["id"] for row in before.rows]
    assert {row["hash"] for row in after.rows}.isdisjoint(row["hash"] for row in before.rows)


def test_examples_drawn_per_document_are_noted(write_task, run):
    shots = {**CHOICE, "training_split": "test", "fewshot_split": "test"}
    (note,) = run(write_task(shots), num_fewshot=1).notes
    assert note.startswith("task 'tiny_choice' draws its 1 examples per document depending on which documents run")
    first = {**shots, "fewshot_config": {"sampler": "first_n"}}
    assert run(write_task(first), num_fewshot=1).notes == ()
    assert run(write_task(CHOICE)).notes == ()


def test_nan_is_refused_not_answer_zero(write_task, run, untied, tokenizer):
    damaged = copy.deepcopy(untied)
    with torch.no_grad():
        damaged.get_input_embeddings().weight[tokenizer("4")["input_ids"][0]] = math.nan
    with pytest.raises(Refused, match=r"^task 'tiny_choice' has a log-likelihood of nan for "):
        run(write_task(CHOICE), on=damaged, count=None)


def test_generation_from_nan_is_refused(write_task, run, model):
    damaged = copy.deepcopy(model)
    with torch.no_grad():
        damaged.model.norm.weight[0] = math.nan
    with pytest.raises(Refused, match=r"^the model's logits are not finite: weights or activations hold NaN"):
        run(write_task(WRITE), on=damaged, metric="exact_match", filter="whole")


def test_a_head_of_its_own_must_stay(write_task, run, model):
    untied = copy.deepcopy(model)
    untied.lm_head.weight = torch.nn.Parameter(untied.lm_head.weight.detach().clone() + 1)
    with pytest.raises(Refused, match=r"^lm-eval has tied the output head to the input embedding, but they were apart"):
        run(write_task(CHOICE), on=untied)


@pytest.mark.parametrize(
    ("config", "options", "message"),
    [
        (
            CHOICE,
            {"max_length": 8},
            r"^a prompt of task 'tiny_choice' has 15 tokens but only 8 fit and lm-eval would c",
        ),
        (WRITE, {"max_length": 8}, r"^a prompt of task 'tiny_write' has 8 tokens but only 2 fit and lm-eval would cut"),
        (
            WRITE,
            {"max_length": 6},
            r"^task 'tiny_write' generates up to 6 tokens, raise max_length \(6\) above that or",
        ),
        (CHOICE, {"count": 13}, r"^task 'tiny_choice' has 12 documents, count 13 must be between 1 and that$"),
        (CHOICE, {"metric": "f1"}, r"^task 'tiny_choice' has no metric 'f1', use acc or brier_score$"),
        (CHOICE, {"metric": "brier_score"}, r"^task 'tiny_choice' does not say that a higher 'brier_score' is better"),
        (CHOICE, {"filter": "first"}, r"^task 'tiny_choice' has no filter 'first', use none$"),
        (WRITE, {"filter": "none"}, r"^task 'tiny_write' has no filter 'none', use whole or first$"),
    ],
    ids=["long-choice", "long-prompt", "no-room", "count", "metric", "lower-is-better", "filter", "filters"],
)
def test_what_cannot_be_measured(write_task, run, config, options, message):
    defaults = {"metric": "exact_match", "filter": "whole"} if config is WRITE else {}
    with pytest.raises((Refused, InputError), match=message):
        run(write_task(config), **(defaults | options))


def test_data_that_is_no_json(write_task, run, tmp_path):
    source = write_task(CHOICE)
    (tmp_path / "items.jsonl").write_text("no json\n", encoding="utf-8")
    with pytest.raises(InputError, match=r"^cannot get the data of task 'tiny_choice': "):
        run(source)


def test_a_package_that_is_missing(write_task, run, tmp_path):
    (tmp_path / "needs.py").write_text("import a_package_nobody_has\n", encoding="utf-8")
    path = write_task(CHOICE)
    with open(path, "a", encoding="utf-8") as file:
        file.write("process_results: !function needs.results\n")
    with pytest.raises(
        InputError, match=r"^task 'tiny_choice' needs a package that is not installed: .*a_package_nobo"
    ):
        run(path)


def test_a_task_by_name_in_a_folder_of_ones_own(write_task, run, tmp_path):
    write_task(CHOICE)
    assert len(run("tiny_choice", include=(str(tmp_path),)).rows) == 5


def test_names_of_the_harness():
    names = task_names()
    assert len(names) > 1000 and {"arc_easy", "hellaswag", "gsm8k"} <= set(names)
    assert check_task("gsm8k").name == "gsm8k"
    with pytest.raises(InputError, match=r"^lm-eval task 'arc_eazy' is unknown, did you mean 'arc_easy'\?$"):
        check_task("arc_eazy")
    with pytest.raises(
        InputError, match=r"^lm-eval task 'qqqqqqqqqq' is unknown, see `compress list tasks`, or give the"
    ):
        check_task("qqqqqqqqqq")
    with pytest.raises(
        InputError, match=r"^'mmlu' is a group of lm-eval tasks without a single metric, name one of its"
    ):
        check_task("mmlu")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"task": ["a", "b"]}, r"does not define one task \(a line 'task: NAME'\), a group has no single metric$"),
        (
            {"unsafe_code": True},
            r"^task 'tiny_choice' runs code written by the model \(unsafe_code\), which is not done",
        ),
        ({"include": "task.yaml"}, r"^task file '.*task.yaml' includes itself$"),
        ({"include": "other.yaml"}, r"^cannot read the task file '.*other.yaml': "),
        (
            {"dataset_kwargs": {"data_files": "none.jsonl"}},
            r"^the data file 'none.jsonl' of the task file '.*' does not",
        ),
        ({"dataset_kwargs": {"data_files": "https://a.b/c"}}, r"takes data from https://a.b/c, download it and name"),
    ],
    ids=["group", "unsafe", "itself", "missing-include", "missing-data", "url"],
)
def test_files_that_are_no_task(write_task, change, message):
    with pytest.raises((InputError, Refused), match=message):
        check_task(write_task(CHOICE | change))


@pytest.mark.parametrize(
    ("text", "message"), [("a: [", "^cannot read the task file"), ("text", "holds no table of op")]
)
def test_files_that_are_no_yaml(tmp_path, text, message):
    (tmp_path / "task.yaml").write_text(text, encoding="utf-8")
    with pytest.raises(InputError, match=message):
        check_task(str(tmp_path / "task.yaml"))


def test_a_missing_file():
    with pytest.raises(InputError, match=r"^task file 'nowhere/task.yaml' does not exist$"):
        check_task("nowhere/task.yaml")


def test_parts_of_the_key_follow_every_file(write_task, tmp_path):
    write_task(CHOICE, name="base.yaml")
    (tmp_path / "functions.py").write_text("def results(doc, found): ...\n", encoding="utf-8")
    (tmp_path / "task.yaml").write_text("include: base.yaml\nprocess_results: !function functions.results\n")
    source = str(tmp_path / "task.yaml")
    parts = task_parts(check_task(source))
    assert [entry.split(":")[0] for entry in parts["files"]] == ["base.yaml", "functions.py", "task.yaml"]
    assert parts["data"] == {"test": [hashlib.sha256((tmp_path / "items.jsonl").read_bytes()).hexdigest()]}
    for name in ("base.yaml", "functions.py", "task.yaml", "items.jsonl"):
        with open(tmp_path / name, "a", encoding="utf-8") as file:
            file.write("\n")
        parts, before = task_parts(check_task(source)), parts
        assert parts != before, name


def test_bound_file_keeps_options_and_names_copies(write_task, tmp_path):
    kwargs = {"data_files": "item*.jsonl", "field": None}
    found = check_task(write_task(CHOICE | {"dataset_kwargs": kwargs}))
    bound = yaml.safe_load(write_bound(found, tmp_path / "cache", num_fewshot=2).read_text())
    digest = hashlib.sha256((tmp_path / "items.jsonl").read_bytes()).hexdigest()
    copied = tmp_path / "cache" / f"sha256-{digest}" / "items.jsonl"
    assert bound["num_fewshot"] == 2 and bound["include"] == str(tmp_path / "task.yaml")
    assert bound["dataset_kwargs"]["data_files"] == {"train": [str(copied)]}
    assert "field" in bound["dataset_kwargs"]
    copied.write_text("damaged")
    write_bound(found, tmp_path / "cache")
    assert copied.read_bytes() == (tmp_path / "items.jsonl").read_bytes()
