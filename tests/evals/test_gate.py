"""Verdicts, looks and refusals of the gate, each from plain rows."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from scipy.stats import norm

from evals.gate import EXIT_CODES, Metric, decide, next_look, overall
from evals.statistics import accuracy_bounds, ratio_bounds

ALPHA = 0.05
TEXT = Metric(id="text", kind="log_perplexity", data="docs", margin=0.03)
MATH = Metric(id="math", kind="gold_nll", data="sums", margin=0.05)
KL = Metric(id="kl", kind="kl", data="docs", margin=0.2, required=False)
TASK = Metric(id="task", kind="accuracy", data="gsm8k", margin=0.05)


def text_rows(n=30, *, shift=0.0, spread=0.0, seed=0, **fields):
    """Rows of n documents with about 2 nats per token, plus a shift per token and a spread per document."""
    rng, own = np.random.default_rng(0), np.random.default_rng(seed + 1)
    rows = []
    for i in range(n):
        tokens = int(rng.integers(50, 300))
        nll = tokens * (2.0 + 0.5 * rng.normal() + shift + spread * own.normal())
        rows.append({"id": f"d{i}", "hash": f"h{i}", "tokens": tokens, "bytes": 4 * tokens, "nll": nll, **fields})
    return rows


def task_rows(scores, **fields):
    return [{"id": f"q{i}", "hash": f"h{i}", "score": score, **fields} for i, score in enumerate(scores)]


def answers(n, *, right, flipped=0):
    """Scores of n questions, the first `right` right, of which the first `flipped` turn wrong."""
    return [float(flipped <= i < right) for i in range(n)]


def edited(rows, place, **fields):
    return [{**row, **fields} if i == place else row for i, row in enumerate(rows)]


# verdicts


@pytest.mark.parametrize(
    ("metric", "rows"),
    [
        (TEXT, text_rows()),
        (MATH, text_rows()),
        (KL, text_rows(kl=0.0)),
        (Metric(id="b", kind="bits_per_byte", data="docs", margin=0.01), text_rows()),
        (TASK, task_rows(answers(100, right=80))),
        (TASK, task_rows([0.5 + 0.004 * i for i in range(100)])),
    ],
    ids=["log_perplexity", "gold_nll", "kl", "bits_per_byte", "accuracy", "graded accuracy"],
)
def test_identical_rows_pass(metric, rows):
    result = decide(metric, rows, rows, alpha=ALPHA)
    assert result.verdict == "PASS", result.reason
    assert result.loss == 0.0 and result.look == result.n == len(rows)


@pytest.mark.parametrize(
    ("shift", "spread", "verdict"), [(0.0, 0.01, "PASS"), (0.2, 0.05, "FAIL"), (0.03, 0.1, "INCONCLUSIVE")]
)
def test_perplexity_verdicts(shift, spread, verdict):
    result = decide(TEXT, text_rows(), text_rows(shift=shift, spread=spread), alpha=ALPHA)
    assert result.verdict == verdict
    assert (result.needed_n is not None) == (verdict == "INCONCLUSIVE")


def test_perplexity_numbers_are_those_of_the_ratio_bound():
    base, variant = text_rows(), text_rows(shift=0.01, spread=0.02)
    result = decide(TEXT, base, variant, alpha=ALPHA)
    tokens = [row["tokens"] for row in base]
    delta = [ours["nll"] - theirs["nll"] for ours, theirs in zip(variant, base, strict=True)]
    bounds = ratio_bounds(delta, tokens, alpha=ALPHA)
    assert (result.loss, result.lower, result.upper) == pytest.approx((bounds.estimate, bounds.lower, bounds.upper))
    assert result.margin == pytest.approx(math.log(1.03))
    assert result.baseline == pytest.approx(sum(row["nll"] for row in base) / sum(tokens))
    assert result.extra["perplexity_variant"] == pytest.approx(math.exp(result.variant))
    assert result.extra["increase_upper"] == pytest.approx(math.exp(bounds.upper) - 1)
    assert result.extra["increase_margin"] == pytest.approx(0.03)
    assert result.extra["clusters"] == 30


def test_bits_per_byte_compares_two_tokenizers():
    metric = Metric(id="b", kind="bits_per_byte", data="docs", margin=0.05)
    base = text_rows()
    variant = [{**row, "hash": "other", "tokens": row["tokens"] + 3, "nll": row["nll"] * 1.01} for row in base]
    result = decide(metric, base, variant, alpha=ALPHA)
    nats, count = sum(row["nll"] for row in base), sum(row["bytes"] for row in base)
    assert result.verdict == "PASS"
    assert result.baseline == pytest.approx(nats / count / math.log(2))
    assert result.loss == pytest.approx(0.01 * result.baseline)


@pytest.mark.parametrize(("kl", "verdict"), [(0.05, "PASS"), (0.4, "FAIL")])
def test_kl_is_bounded_against_its_maximum_from_the_variant_alone(kl, verdict):
    base = text_rows()
    variant = [{**row, "kl": kl * row["tokens"] * (0.9 + 0.2 * (i % 2)), "agree": row["tokens"] // 2, "top1": 9}
               for i, row in enumerate(base)]  # fmt: skip
    result = decide(KL, base, variant, alpha=ALPHA)
    assert result.verdict == verdict and result.baseline is None
    assert result.loss == pytest.approx(kl, rel=0.02)
    assert result.lower < result.loss < result.upper
    assert result.extra["agreement"] == pytest.approx(0.5, abs=0.01) and "top1_baseline" not in result.extra


def test_accuracy_uses_tango_on_the_discordant_pairs():
    base = task_rows(answers(200, right=150))
    variant = task_rows(answers(200, right=153, flipped=4))
    result = decide(TASK, base, variant, alpha=ALPHA)
    bounds = accuracy_bounds(4, 3, 200, alpha=ALPHA)
    assert (result.loss, result.lower, result.upper) == (bounds.estimate, bounds.lower, bounds.upper)
    assert (result.extra["b"], result.extra["c"], result.extra["flips"]) == (4, 3, 7 / 200)
    assert (result.baseline, result.variant, result.verdict) == (0.75, 149 / 200, "PASS")


def test_graded_accuracy_uses_the_paired_t_bound_and_loses_when_lower():
    base, variant = [0.5 + 0.004 * i for i in range(100)], [0.3 + 0.004 * i + 0.01 * (i % 2) for i in range(100)]
    result = decide(TASK, task_rows(base), task_rows(variant), alpha=ALPHA)
    assert result.verdict == "FAIL" and result.loss == pytest.approx(0.195) and result.extra["clusters"] == 100


def test_graded_answers_need_as_many_samples_as_right_or_wrong_ones():
    """Twenty unchanged answers, one of them graded, have a spread of 0: no evidence of a loss below 5 points."""
    scores = [0.5, *answers(57, right=57)]
    result = decide(TASK, task_rows(scores), task_rows(scores), alpha=ALPHA)
    assert result.reason == "58 samples are too few, at least 59 are needed for this margin; evaluate more"
    assert decide(TASK, task_rows([*scores, 1.0]), task_rows([*scores, 1.0]), alpha=ALPHA).verdict == "PASS"


def test_reasons_speak_the_unit_of_the_metric():
    base = text_rows()
    good = decide(TEXT, base, text_rows(shift=0.01), alpha=ALPHA)
    assert good.reason == "the loss is at most +1.01%, below the margin of +3.00%"
    bad = decide(MATH, base, text_rows(shift=0.2), alpha=ALPHA)
    assert bad.reason == "the loss is at least +0.2000 nats, above the margin of +0.0500 nats"
    open_end = decide(
        TASK, task_rows(answers(100, right=80)), task_rows(answers(100, right=80, flipped=2)), alpha=ALPHA
    )
    assert open_end.reason == (
        "the loss is between -0.69 pp and +5.86 pp around the margin of +5.00 pp; "
        "about 135 samples would decide if it stays at +2.00 pp"
    )


def test_a_loss_that_equals_the_margin_is_decided_by_no_number_of_samples():
    metric = Metric(id="t", kind="accuracy", data="d", margin=0.02)
    base = task_rows(answers(400, right=300))
    result = decide(metric, base, task_rows(answers(400, right=300, flipped=8)), alpha=ALPHA)
    assert result.needed_n is None and result.reason.endswith(
        "no number of samples decides a loss that equals the margin"
    )


def test_needed_samples_do_decide_when_the_same_spread_repeats():
    base, variant = text_rows(), text_rows(shift=0.02, spread=0.05)
    short = decide(TEXT, base, variant, alpha=ALPHA)
    assert short.verdict == "INCONCLUSIVE"
    times = math.ceil(short.needed_n / 30)
    repeat = [[{**row, "id": f"{k}{row['id']}"} for k in range(times) for row in rows] for rows in (base, variant)]
    assert decide(TEXT, *repeat, alpha=ALPHA).verdict == "PASS"


def test_the_difference_between_two_baseline_runs_widens_both_bounds():
    base, variant = text_rows(), text_rows(shift=0.01, spread=0.02)
    plain = decide(TEXT, base, variant, alpha=ALPHA)
    wide = decide(TEXT, base, variant, alpha=ALPHA, aa_difference=-0.02)
    assert wide.upper == pytest.approx(plain.upper + 0.02) and wide.lower == pytest.approx(plain.lower - 0.02)
    assert (plain.verdict, wide.verdict, wide.extra["aa_difference"]) == ("PASS", "INCONCLUSIVE", 0.02)
    assert "aa_difference" not in plain.extra  # one run shows no difference, which is not a difference of none


# looks


LOOKS = Metric(id="math", kind="gold_nll", data="sums", margin=0.05, looks=(30, 60, 120))


def test_a_clear_case_is_decided_at_the_first_look_with_the_alpha_spent_there():
    result = decide(LOOKS, text_rows(120), text_rows(120, shift=0.3, spread=0.05), alpha=ALPHA)
    assert (result.verdict, result.look, result.n) == ("FAIL", 30, 30)
    assert result.alpha_spent == pytest.approx(ALPHA / 4) and result.extra["alpha_look"] == pytest.approx(ALPHA / 4)


def test_the_last_look_has_spent_all_of_alpha():
    result = decide(LOOKS, text_rows(120), text_rows(120, shift=0.05, spread=0.1), alpha=ALPHA)
    assert (result.verdict, result.look) == ("INCONCLUSIVE", 120)
    assert result.alpha_spent == pytest.approx(ALPHA) and result.extra["alpha_look"] == pytest.approx(ALPHA / 2)


def test_rows_up_to_a_look_that_decided_are_evidence_and_give_the_same_result():
    base, variant = text_rows(120), text_rows(120, shift=0.3, spread=0.05)
    assert decide(LOOKS, base[:30], variant[:30], alpha=ALPHA) == decide(LOOKS, base, variant, alpha=ALPHA)
    assert decide(LOOKS, base[:45], variant[:45], alpha=ALPHA) == decide(LOOKS, base, variant, alpha=ALPHA)


@pytest.mark.parametrize("n", [10, 30, 60, 119])
def test_fewer_rows_without_a_decision_are_refused(n):
    result = decide(LOOKS, text_rows(n), text_rows(n, shift=0.05, spread=0.1), alpha=ALPHA)
    assert result.verdict == "REFUSED"
    assert result.reason == (
        f"{n} of 120 declared samples were evaluated and no look at them decided; evaluate the rest"
    )


def test_a_baseline_measured_in_full_is_cut_to_a_variant_that_stopped_early():
    base, variant = text_rows(120), text_rows(120, shift=0.3, spread=0.05)
    assert decide(LOOKS, base, variant[:30], alpha=ALPHA) == decide(LOOKS, base, variant, alpha=ALPHA)
    assert next_look(LOOKS, base, text_rows(60, shift=0.05, spread=0.1), alpha=ALPHA) == 120
    all_at_once = Metric(id="math", kind="gold_nll", data="sums", margin=0.05)
    assert decide(all_at_once, base, variant[:30], alpha=ALPHA).verdict == "REFUSED"


def test_rows_beyond_the_last_look_are_not_used():
    base, variant = text_rows(150), text_rows(150, shift=0.05, spread=0.1)
    assert decide(LOOKS, base, variant, alpha=ALPHA) == decide(LOOKS, base[:120], variant[:120], alpha=ALPHA)


def test_next_look_walks_until_a_decision():
    base, close, bad = text_rows(120), text_rows(120, shift=0.05, spread=0.1), text_rows(120, shift=0.3, spread=0.05)

    def wanted(variant, n):
        return next_look(LOOKS, base[:n], variant[:n], alpha=ALPHA)

    assert [wanted(close, n) for n in (0, 30, 60, 120)] == [30, 60, 120, None]
    assert [wanted(bad, n) for n in (0, 30)] == [30, None]
    assert wanted(edited(close, 0, nll=math.nan), 30) is None


def test_a_look_below_the_floor_decides_nothing_and_the_last_one_refuses():
    early = Metric(id="math", kind="gold_nll", data="sums", margin=0.05, looks=(10, 40))
    assert decide(early, text_rows(40), text_rows(40), alpha=ALPHA).look == 40
    late = Metric(id="math", kind="gold_nll", data="sums", margin=0.05, looks=(5, 10))
    assert decide(late, text_rows(10), text_rows(10), alpha=ALPHA).verdict == "REFUSED"


def test_looks_share_alpha_so_that_peeking_does_not_raise_the_false_pass_rate():
    """The true loss equals the margin, so every PASS is false; peeking at the whole alpha each time passes more."""
    rng, runs, looks = np.random.default_rng(11), 300, (20, 40, 80, 160)
    metric = Metric(id="m", kind="gold_nll", data="d", margin=0.05, looks=looks)
    plain = Metric(id="m", kind="gold_nll", data="d", margin=0.05)
    base = [{"id": i, "hash": "h", "tokens": 1, "nll": 5.0} for i in range(looks[-1])]
    spent = peeking = 0
    for _ in range(runs):
        variant = [{**row, "nll": 5.05 + 0.2 * noise} for row, noise in zip(base, rng.normal(size=160), strict=True)]
        spent += decide(metric, base, variant, alpha=ALPHA).verdict == "PASS"
        peeking += any(decide(plain, base[:k], variant[:k], alpha=ALPHA).verdict == "PASS" for k in looks)
    assert 0.01 < spent / runs < ALPHA + 3 * math.sqrt(ALPHA * (1 - ALPHA) / runs)
    assert peeking / runs > 0.09


# refusals


BASE = text_rows()
NAN = math.nan


@pytest.mark.parametrize(
    ("variant", "reason"),
    [
        ([], "nothing was evaluated: 30 baseline and 0 variant samples"),
        (BASE[:-1], "sample 'd29' is on one side only, of 30 baseline and 29 variant samples"),
        (edited(BASE, 4, id="x"), "sample 'd4' is on one side only, of 30 baseline and 30 variant samples"),
        (edited(BASE, 4, id="d3"), "the variant holds sample 'd3' more than once"),
        ([BASE[1], BASE[0], *BASE[2:]], "the order differs at place 0: 'd0' and 'd1'"),
        (edited(BASE, 2, hash="z"), "sample 'd2' differs between the sides in its hash: 'h2' and 'z'"),
        (edited(BASE, 2, hash=None), "sample 'd2' differs between the sides in its hash: 'h2' and None"),
        (edited(BASE, 2, tokens=1), "sample 'd2' differs between the sides in its tokens: 68 and 1"),
        (edited(BASE, 7, nll=NAN), "the variant's nll of sample 'd7' is not a finite number"),
        (edited(BASE, 7, nll=math.inf), "the variant's nll of sample 'd7' is not a finite number"),
        (edited(BASE, 7, nll=None), "the variant's nll of sample 'd7' is not a finite number"),
        (edited(BASE, 7, nll="2.0"), "the variant's nll of sample 'd7' is not a finite number"),
        (edited(BASE, 7, nll=-3.0), "the variant's nll of sample 'd7' cannot be -3"),
        (edited(BASE, 1, truncated=True),
         "the variant's context of sample 'd1' was truncated; raise max_length or drop the sample"),
    ],
    ids=["none", "fewer", "other id", "doubled", "order", "hash", "no hash", "tokens", "nan", "inf", "none nll",
         "text nll", "negative", "truncated"],
)  # fmt: skip
def test_rows_that_are_no_evidence_are_refused(variant, reason):
    result = decide(TEXT, BASE, variant, alpha=ALPHA)
    assert (result.verdict, result.reason) == ("REFUSED", reason)
    assert (result.loss, result.lower, result.upper, result.n) == (None, None, None, len(variant))


@pytest.mark.parametrize(
    "rows", [edited(BASE, 3, nll=NAN), edited(BASE, 3, tokens=0), [{**row, "nll": NAN} for row in BASE]]
)
def test_identical_but_broken_rows_are_refused(rows):
    assert decide(TEXT, rows, rows, alpha=ALPHA).verdict == "REFUSED"


def test_bits_per_byte_refuses_another_text():
    metric = Metric(id="b", kind="bits_per_byte", data="docs", margin=0.05)
    result = decide(metric, BASE, edited(BASE, 0, bytes=7), alpha=ALPHA)
    assert result.reason == "sample 'd0' differs between the sides in its bytes: 1048 and 7"


@pytest.mark.filterwarnings("ignore:(overflow|invalid value):RuntimeWarning")
def test_sums_beyond_float64_are_refused():
    result = decide(TEXT, BASE, [{**row, "nll": 1.7e308} for row in BASE], alpha=ALPHA)
    assert (result.verdict, result.reason) == ("REFUSED", "the bounds nan and inf are not finite")


@pytest.mark.parametrize("kl", [NAN, None, -5.0])
def test_kl_that_is_no_divergence_is_refused(kl):
    assert decide(KL, BASE, text_rows(kl=kl), alpha=ALPHA).verdict == "REFUSED"


@pytest.mark.parametrize("score", [NAN, 1.5, -0.5])
def test_scores_outside_zero_and_one_are_refused(score):
    rows = task_rows(answers(100, right=80))
    assert decide(TASK, rows, edited(rows, 3, score=score), alpha=ALPHA).verdict == "REFUSED"


@pytest.mark.parametrize(
    ("metric", "rows", "floor"),
    [
        (TEXT, text_rows(19), 20),
        (Metric(id="t", kind="log_perplexity", data="d", margin=0.03, min_units=31), text_rows(30), 31),
        (TASK, task_rows(answers(58, right=50)), 59),
        (Metric(id="t", kind="accuracy", data="d", margin=0.01), task_rows(answers(298, right=250)), 299),
    ],
    ids=["clusters", "min_units", "pairs 5pp", "pairs 1pp"],
)
def test_too_few_samples_are_refused(metric, rows, floor):
    result = decide(metric, rows, rows, alpha=ALPHA)
    assert result.reason == (
        f"{len(rows)} samples are too few, at least {floor} are needed for this margin; evaluate more"
    )
    enough = decide(metric, *[[*rows, {**rows[0], "id": "one more"}]] * 2, alpha=ALPHA)
    assert enough.verdict == "PASS"


def test_a_baseline_near_chance_cannot_pass():
    rows = task_rows(answers(150, right=46))
    metric = Metric(id="mc", kind="accuracy", data="d", margin=0.05, chance=0.25, min_signal=0.1)
    result = decide(metric, rows, rows, alpha=ALPHA)
    assert result.verdict == "REFUSED"
    assert result.reason == (
        "NO_SIGNAL: the baseline's accuracy is only shown to be above 24.5%, with chance at 25.0% and 15.0% above it "
        "needed to see a loss; use an easier task"
    )


def test_min_signal_and_three_margins_both_bind():
    rows = task_rows(answers(400, right=100))  # lower bound 21.4%
    narrow = {"id": "t", "kind": "accuracy", "data": "d"}
    assert decide(Metric(**narrow, margin=0.05), rows, rows, alpha=ALPHA).verdict == "PASS"
    assert decide(Metric(**narrow, margin=0.05, min_signal=0.3), rows, rows, alpha=ALPHA).verdict == "REFUSED"
    assert decide(Metric(**narrow, margin=0.08), rows, rows, alpha=ALPHA).verdict == "REFUSED"


def test_graded_baseline_without_signal_is_refused():
    rows = task_rows([0.1] * 50 + [0.0] * 50)
    assert decide(TASK, rows, rows, alpha=ALPHA).reason.startswith("NO_SIGNAL")


def test_generations_at_the_length_cap_are_refused_above_the_limit():
    base = task_rows(answers(100, right=80), gen_capped=False)
    variant = [{**row, "gen_capped": i < 6} for i, row in enumerate(base)]
    result = decide(TASK, base, variant, alpha=ALPHA)
    assert result.reason == "6 of 100 generations of the variant hit the length cap, more than 5%; raise the cap"
    allowed = decide(TASK, base, edited(base, 0, gen_capped=True), alpha=ALPHA)
    assert allowed.verdict == "PASS" and allowed.extra["cap_hit_variant"] == 0.01
    assert decide(replace(TASK, cap_hit_max=NAN), base, base, alpha=ALPHA).verdict == "REFUSED"


@pytest.mark.parametrize("difference", [0.05, NAN, math.inf])
def test_baseline_runs_that_differ_by_more_than_the_margin_are_refused(difference):
    result = decide(TEXT, BASE, BASE, alpha=ALPHA, aa_difference=difference)
    assert result.reason == f"two runs of the baseline differ by {difference:g}, more than the margin 0.0295588"


@pytest.mark.parametrize(("n", "verdict"), [(29, "REFUSED"), (30, "PASS"), (31, "REFUSED")])
def test_declared_and_evaluated_counts_must_agree(n, verdict):
    metric = Metric(id="t", kind="log_perplexity", data="d", margin=0.03, samples=30)
    assert decide(metric, text_rows(n), text_rows(n), alpha=ALPHA).verdict == verdict


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"kind": "ppl"}, "kind 'ppl' of metric 'm' is none of log_perplexity, gold_nll, bits_per_byte, kl, accuracy"),
        ({"margin": NAN}, "margin nan of metric 'm' must be above 0, below 1 for accuracy"),
        ({"margin": 0.0}, "margin 0.0 of metric 'm' must be above 0, below 1 for accuracy"),
        ({"kind": "accuracy", "margin": 2.0}, "margin 2.0 of metric 'm' must be above 0, below 1 for accuracy"),
        ({"looks": (50, 20)}, "looks must be rising sample counts, got [50, 20]"),
        ({"samples": 0}, "looks must be rising sample counts, got [0]"),
        ({"looks": (20, 50), "samples": 60}, "metric 'm' declares 60 samples and a last look at 50"),
    ],
)
def test_a_metric_that_cannot_be_is_an_error(fields, text):
    with pytest.raises(ValueError) as error:
        Metric(**({"id": "m", "kind": "gold_nll", "data": "d", "margin": 0.1} | fields))
    assert str(error.value) == text


@pytest.mark.parametrize("alpha", [0.0, 0.5, NAN])
def test_alpha_must_be_a_level(alpha):
    with pytest.raises(ValueError, match=r"alpha must be above 0 and below 0\.5"):
        decide(TEXT, BASE, BASE, alpha=alpha)


# overall


def results(**verdicts):
    """One result per metric id; ids that begin with 'soft' are not required."""
    made = {
        "PASS": text_rows(),
        "FAIL": text_rows(shift=0.3),
        "INCONCLUSIVE": text_rows(shift=0.03, spread=0.1),
        "REFUSED": edited(text_rows(), 0, nll=NAN),
    }
    found = []
    for name, verdict in verdicts.items():
        metric = Metric(id=name, kind="log_perplexity", data="d", margin=0.03, required=not name.startswith("soft"))
        found.append(decide(metric, text_rows(), made[verdict], alpha=ALPHA))
    assert [result.verdict for result in found] == list(verdicts.values())
    return found


@pytest.mark.parametrize(
    ("verdicts", "verdict"),
    [
        ({"a": "PASS", "b": "PASS"}, "PASS"),
        ({"a": "PASS", "b": "INCONCLUSIVE"}, "INCONCLUSIVE"),
        ({"a": "INCONCLUSIVE", "b": "FAIL"}, "FAIL"),
        ({"a": "FAIL", "b": "REFUSED", "c": "PASS"}, "REFUSED"),
        ({"a": "PASS", "soft": "FAIL"}, "PASS"),
        ({"soft": "PASS"}, "REFUSED"),
    ],
    ids=lambda value: value if isinstance(value, str) else "+".join(value.values()),
)
def test_the_worst_required_verdict_wins(verdicts, verdict):
    outcome = overall(results(**verdicts))
    assert (outcome.verdict, outcome.exit_code) == (verdict, EXIT_CODES[verdict])


def test_exit_codes():
    assert EXIT_CODES == {"REFUSED": 5, "FAIL": 3, "INCONCLUSIVE": 4, "PASS": 0}


def test_a_metric_that_is_not_required_warns():
    outcome = overall(results(a="PASS", soft="FAIL"))
    assert outcome.warnings == ("soft: FAIL, the loss is at least +34.99%, above the margin of +3.00%",)


def test_a_required_metric_without_a_result_refuses_unless_another_ended_the_evaluation():
    declared = [Metric(id=name, kind="log_perplexity", data="d", margin=0.03) for name in ("a", "b")]
    missing = overall(results(a="PASS"), metrics=declared)
    assert (missing.verdict, missing.reason) == ("REFUSED", "no result for b")
    assert overall(results(a="FAIL"), metrics=declared).verdict == "FAIL"
    assert overall([], metrics=declared).reason == "no result for a, b"
    assert overall([]).reason == "no required metric was evaluated"


def test_reasons_beside_the_rows_refuse_whatever_the_metrics_say():
    outcome = overall(results(a="PASS", soft="FAIL"), refusals=["the tokenizers differ", "no signal"])
    assert (outcome.verdict, outcome.exit_code) == ("REFUSED", 5)
    assert outcome.reason == "the tokenizers differ; no signal" and len(outcome.warnings) == 1


def test_results_are_plain_json():
    for result in results(a="PASS", b="FAIL", c="INCONCLUSIVE", d="REFUSED"):
        assert json.loads(json.dumps(result.record(), allow_nan=False))["id"] == result.metric


def test_the_normal_quantile_is_one_sided():
    """A lossless variant with no flips passes as soon as z^2 / (n + z^2) is below the margin and the floor is met."""
    z = norm.isf(ALPHA)
    rows = task_rows(answers(59, right=50))
    assert decide(TASK, rows, rows, alpha=ALPHA).upper == pytest.approx(z**2 / (59 + z**2))
