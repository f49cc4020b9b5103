"""Divergences against slow twins, and the loss in parts against the loss on whole logits."""

import math
from functools import partial

import pytest
import torch
from torch import nn

from compress.head import Head
from distill.losses import Loss, States, TopK, divergence, summed_loss

P = torch.tensor([[0.5, 0.25, 0.25]])
Q = torch.tensor([[0.25, 0.25, 0.5]])
LOSSES = [
    pytest.param(Loss(), id="forward"),
    pytest.param(Loss("reverse"), id="reverse"),
    pytest.param(Loss("jsd", beta=0.3), id="jsd"),
    pytest.param(Loss(temperature=2.0), id="warm"),
    pytest.param(Loss("jsd", beta=0.5, temperature=0.7, ce=0.25), id="mixed"),
    pytest.param(Loss(ce=1.0), id="ce"),
]


def kl(p, q):
    """Term by term."""
    return sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))


def twin(teacher, student, targets, loss):
    """One token at a time, in Python's own floats."""
    total = 0.0
    for t, s, target in zip(teacher.tolist(), student.tolist(), targets.tolist(), strict=True):
        p, q = (softmax(x, loss.temperature) for x in (t, s))
        m = [loss.beta * a + (1 - loss.beta) * b for a, b in zip(p, q, strict=True)]
        found = {
            "forward": lambda p=p, q=q: kl(p, q),
            "reverse": lambda p=p, q=q: kl(q, p),
            "jsd": lambda p=p, q=q, m=m: loss.beta * kl(p, m) + (1 - loss.beta) * kl(q, m),
        }[loss.divergence]()
        total += (1 - loss.ce) * found * loss.temperature**2 - loss.ce * math.log(softmax(s, 1.0)[target])
    return total


def softmax(logits, temperature):
    powers = [math.exp(x / temperature) for x in logits]
    return [power / sum(powers) for power in powers]


def head(weight):
    return Head(partial(nn.functional.linear, weight=weight), (("final_logit_softcapping", 20.0),), len(weight))


@pytest.fixture
def sides():
    """States and output embeddings of both sides, and targets, of 13 tokens."""
    generator = torch.Generator().manual_seed(0)
    draw = partial(torch.randn, generator=generator)
    return draw(13, 8), draw(31, 8), draw(13, 6), draw(31, 6), torch.randint(0, 31, (13,), generator=generator)


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        pytest.param(Loss(), 0.25 * math.log(2), id="forward"),
        pytest.param(Loss("reverse"), 0.25 * math.log(2), id="reverse"),
        pytest.param(Loss("jsd"), 0.5 * math.log(4 / 3) + 0.25 * math.log(2 / 3), id="jsd"),
    ],
)
def test_golden_values(loss, expected):
    assert divergence(P.log(), Q.log(), loss).tolist() == pytest.approx([expected], abs=1e-6)


def test_forward_and_reverse_differ_in_direction():
    p, q = torch.tensor([[0.9, 0.1]]).log(), torch.tensor([[0.5, 0.5]]).log()
    assert float(divergence(p, q, Loss())) == pytest.approx(kl([0.9, 0.1], [0.5, 0.5]), abs=1e-6)
    assert float(divergence(p, q, Loss("reverse"))) == pytest.approx(kl([0.5, 0.5], [0.9, 0.1]), abs=1e-6)


def test_equal_distributions_have_no_divergence_and_no_gradient():
    logits = torch.randn(4, 9, generator=torch.Generator().manual_seed(3)).requires_grad_()
    for kind in ("forward", "reverse", "jsd"):
        found = divergence(logits.detach(), logits, Loss(kind)).sum()
        (gradient,) = torch.autograd.grad(found, logits)
        assert abs(found.item()) < 1e-6 and float(gradient.abs().max()) < 1e-6


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("tokens", [1, 5, 13, None])
def test_parts_give_the_whole_loss_and_its_gradients(sides, loss, tokens):
    theirs, their_weight, ours, our_weight, targets = sides
    ours.requires_grad_(), our_weight.requires_grad_()
    found = summed_loss((ours, head(our_weight)), States(theirs, head(their_weight)), targets, loss=loss, tokens=tokens)
    gradients = torch.autograd.grad(found, (ours, our_weight))

    logits, reference = head(our_weight).logits(ours), head(their_weight).logits(theirs)
    whole = (1 - loss.ce) * divergence(reference, logits, loss).sum()
    whole = whole + loss.ce * nn.functional.cross_entropy(logits, targets, reduction="sum")
    assert found.item() == pytest.approx(twin(reference, logits, targets, loss), rel=1e-5)
    for got, expected in zip(gradients, torch.autograd.grad(whole, (ours, our_weight)), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


def test_padded_vocabularies_are_compared_on_what_both_have(sides):
    theirs, their_weight, ours, our_weight, targets = sides
    padded = torch.cat([our_weight, torch.zeros(3, 6)])
    sums = [
        summed_loss((ours, head(weight)), States(theirs, head(their_weight)), targets, loss=Loss())
        for weight in (our_weight, padded)
    ]
    assert float(sums[0]) == float(sums[1])


def test_no_more_logits_than_asked_exist_at_a_time(sides):
    theirs, their_weight, ours, our_weight, targets = sides
    seen = []

    def project(states):
        seen.append(len(states))
        return states @ our_weight.T

    summed_loss((ours, Head(project, (), 31)), States(theirs, head(their_weight)), targets, loss=Loss(), tokens=4)
    assert seen == [4, 4, 4, 1]


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("tokens", [5, None])
def test_all_ids_recorded_give_the_whole_loss_and_its_gradients(sides, loss, tokens):
    theirs, their_weight, ours, our_weight, targets = sides
    ours.requires_grad_(), our_weight.requires_grad_()
    student = (ours, head(our_weight))
    recorded = TopK.of(head(their_weight).logits(theirs), 31, loss.temperature)
    assert recorded.log_p.shape == (13, 31)  # nothing is left over
    found = [
        summed_loss(student, teacher, targets, loss=loss, tokens=tokens)
        for teacher in (recorded, States(theirs, head(their_weight)))
    ]
    assert found[0].item() == pytest.approx(found[1].item(), rel=1e-5)
    gradients = [torch.autograd.grad(each, (ours, our_weight)) for each in found]
    for got, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("k", [1, 4, 30])
def test_the_rest_is_one_more_token(sides, k):
    theirs, their_weight, ours, our_weight, _ = sides
    reference, logits = head(their_weight).logits(theirs), head(our_weight).logits(ours)
    found = TopK.of(reference, k, 1.0).divergence(logits, Loss())
    for t in range(13):
        p, q = softmax(reference[t].tolist(), 1.0), softmax(logits[t].tolist(), 1.0)
        likeliest = sorted(range(31), key=lambda i, p=p: -p[i])[:k]
        sides_of = [[*(each[i] for i in likeliest), 1 - sum(each[i] for i in likeliest)] for each in (p, q)]
        assert float(found[t]) == pytest.approx(kl(*sides_of), rel=1e-3, abs=1e-6)


def test_more_ids_come_closer_to_the_whole_divergence_from_below(sides):
    theirs, their_weight, ours, our_weight, _ = sides
    reference, logits = head(their_weight).logits(theirs), head(our_weight).logits(ours)
    sums = [float(TopK.of(reference, k, 1.0).divergence(logits, Loss()).sum()) for k in (1, 2, 8, 20, 31)]
    assert sums == sorted(sums) and sums[-1] == pytest.approx(float(divergence(reference, logits, Loss()).sum()))
