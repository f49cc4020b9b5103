"""Training curves and the loss by stage, from plain data to words and pictures."""

import pytest

from compress.kv_report import Section
from compress.pictures import learning, steps
from compress.stage_report import added_losses, stage_sections

CURVE = [{"step": 0, "kl": 0.5}, {"step": 10, "kl": 0.25, "loss": 0.4}, {"step": 20, "kl": 0.3, "loss": 0.2}]


def stage(name, *losses):
    kinds = (("text", "log_perplexity", 0.04), ("math", "gold_nll", 0.05))
    metrics = [
        {"id": metric, "kind": kind, "loss": loss, "margin": margin}
        for (metric, kind, margin), loss in zip(kinds, losses, strict=True)
    ]
    return {"stage": name, "metrics": metrics}


FALL = [stage("prune", 0.3, 0.5), stage("distil", 0.1, 0.2), stage("quantize", 0.12, None)]
RUN = {"stages": [{"summary": "distil", "report": {"curve": CURVE}}, {"summary": "quantize"}], "waterfall": FALL}


def test_what_stages_added_sums_to_the_whole():
    added = added_losses(FALL)
    assert added["text"] == [pytest.approx(0.3), pytest.approx(-0.2), pytest.approx(0.02)]
    assert added["math"] == [pytest.approx(0.5), pytest.approx(-0.3), None]


def test_sections():
    fall, curve = stage_sections(RUN)
    assert fall.header == ("stage", "text: added", "text: so far", "math: added", "math: so far")
    assert fall.rows[1] == ("distil", "-18.13%", "+10.52%", "-0.3000 nats", "+0.2000 nats")
    assert fall.rows[2][3:] == ("–", "–")
    assert curve == Section(
        "Training: distil",
        "Held-out KL, nats per token, went from 0.5000 to 0.2500 at step 10, the state that was kept. The loss is the "
        "mean since the row before.",
        ("step", "loss", "held-out KL"),
        [("0", "–", "0.5000"), ("10", "0.4000", "0.2500"), ("20", "0.2000", "0.3000")],
    )
    assert stage_sections({"stages": [{"summary": "quantize", "report": {}}]}) == []


def test_experts_that_saw_few_tokens_are_listed_the_rarest_first():
    blocks = [
        {"block": "model.layers.0", "layers": {}, "expert_tokens": {"a.experts.0": 64, "a.experts.1": 63}},
        {"block": "model.layers.1", "layers": {}, "expert_tokens": {"b.experts.0": 0, "b.experts.1": 500}},
    ]
    run = {"stages": [{"summary": "quantize to int4 (gptq)", "report": {"expert_floor": 64, "blocks": blocks}}]}
    assert stage_sections(run) == [
        Section(
            "Experts seldom chosen: quantize to int4 (gptq)",
            "The router sent fewer than 64 calibration tokens to 2 of 4 experts. Each expert is shown at least 64 "
            "tokens of every batch, others of the batch where the router sends fewer, so it is calibrated on inputs of "
            "its layer all the same. More calibration samples make this rarer.",
            ("expert", "tokens"),
            [("b.experts.0", "0"), ("a.experts.1", "63")],
        )
    ]
    blocks[0]["expert_tokens"], blocks[1]["expert_tokens"] = {"a.experts.0": 64}, {}
    assert stage_sections(run) == []


def test_pictures_say_their_numbers():
    assert "from 0.5000 to 0.2500 at step 10" in learning(CURVE, name="distil")
    drawn = steps({"text": [7.5, -5.0, 0.5], "math": [10.0, -6.0, None]}, ["prune", "distil", "quantize"])
    assert "text +7.50, -5.00, +0.50; math +10.00, -6.00, –" in drawn


def test_what_learning_won_is_shown_by_block():
    learned = {"iterations": 16, "loss_before": 0.001928, "loss_after": 0.001751}
    stage = {
        "summary": "quantize to int4 (learned)",
        "report": {"blocks": [{"block": "model.layers.0", "learned": learned}]},
    }
    (section,) = stage_sections({"stages": [stage]})
    assert section.title == "Learned rounding: quantize to int4 (learned)"
    assert section.text.startswith("16 iterations a block")
    assert section.rows == [("model.layers.0", "0.193%", "0.175%")]
