"""Windows of token ids against the harness whose rules they follow, and against counting by hand."""

import hashlib

import pytest
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from transformers import PreTrainedTokenizerFast

from compress.errors import InputError, Refused
from evals.windows import Window, _rolling, encode, prefix_token, total_tokens


@pytest.mark.parametrize("max_length", [2, 3, 7, 64])
def test_document_windows_are_those_of_lm_eval(max_length):
    for n in range(1, 40):
        tokens = list(range(100, 100 + n))
        pairs = map(make_disjoint_window, get_rolling_token_windows(tokens, 1, max_length, 1))
        theirs = [(context + scored, len(scored)) for context, scored in pairs]
        assert [(list(w.ids), w.scored) for w in _rolling((1, *tokens), max_length)] == theirs


def test_every_token_of_a_document_is_scored_once_in_order(tokenizer, sample_set):
    text = "The quick brown fox jumps over the lazy dog. " * 5
    (found,) = encode(tokenizer, sample_set(text), max_length=50)
    scored = [token for window in found.windows for token in window.ids[-window.scored :]]
    assert scored == tokenizer(text)["input_ids"]
    assert found.tokens == len(scored) and found.size == len(text)
    assert max(len(window.ids) for window in found.windows) == 51
    assert total_tokens([found]) == sum(len(window.ids) - 1 for window in found.windows)


def test_documents_are_cut_to_max_tokens_and_the_bytes_with_them(tokenizer, sample_set):
    (found,) = encode(tokenizer, sample_set("abcdef"), max_length=50, max_tokens=4)
    ids = (1, *tokenizer("abcd")["input_ids"])
    assert found.windows == (Window(ids, 4),)
    assert (found.tokens, found.size) == (4, 4)


def test_problem_scores_the_target_alone(tokenizer, sample_set):
    (found,) = encode(tokenizer, sample_set(("1+1=", " 2.")), max_length=50)
    assert found.windows == (Window(tuple(tokenizer("1+1= 2.")["input_ids"]), 3),)
    assert found.size == 3


def test_spaces_at_the_end_of_the_context_belong_to_the_target(tokenizer, sample_set):
    (found,) = encode(tokenizer, sample_set(("1+1= \n", "2")), max_length=50)
    assert found.windows[0].scored == 3


@pytest.mark.parametrize(("add_bos", "scored_first"), [(True, 1), (False, None), (None, None)])
def test_bos_before_a_problem(tokenizer, sample_set, add_bos, scored_first):
    (found,) = encode(tokenizer, sample_set(("a", "b")), max_length=50, add_bos=add_bos)
    ids = tuple(tokenizer("ab")["input_ids"])
    assert found.windows == (Window((scored_first, *ids) if scored_first else ids, 1),)


def test_bos_where_the_tokenizer_puts_one(tokenizer, sample_set):
    from tokenizers.processors import TemplateProcessing

    backend = tokenizer.backend_tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    backend.post_processor = TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)])
    theirs = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")
    (problem,) = encode(theirs, sample_set(("a", "b")), max_length=50)
    assert problem.windows == (Window((1, *tokenizer("ab")["input_ids"]), 1),)  # and no </s> at the end
    (document,) = encode(theirs, sample_set("ab"), max_length=50)
    assert document.windows == (Window((1, *tokenizer("ab")["input_ids"]), 2),)  # one BOS, not two


def test_no_context_begins_with_the_prefix(tokenizer, sample_set):
    (found,) = encode(tokenizer, sample_set(("", "ab")), max_length=50)
    assert found.windows == (Window((1, *tokenizer("ab")["input_ids"]), 2),)


def test_prefix_is_bos_or_else_eos(tokenizer):
    backend = tokenizer.backend_tokenizer
    assert prefix_token(tokenizer) == 1
    assert prefix_token(PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>")) == 2
    with pytest.raises(InputError, match=r"^the tokenizer has neither a BOS nor an EOS token, so a first token cannot"):
        prefix_token(PreTrainedTokenizerFast(tokenizer_object=backend))


def test_hash_covers_ids_and_what_is_scored(tokenizer, sample_set):
    (document,) = encode(tokenizer, sample_set("ab"), max_length=50)
    ids = ",".join(map(str, (1, *tokenizer("ab")["input_ids"])))
    assert document.hash == hashlib.sha256(f"2:{ids}".encode()).hexdigest()
    one, other = (encode(tokenizer, sample_set(pair), max_length=50)[0] for pair in [("a", "bc"), ("ab", "c")])
    assert one.windows[0].ids == other.windows[0].ids and one.hash != other.hash


@pytest.mark.parametrize(
    ("text", "max_length", "message"),
    [
        (("abcdef", "gh"), 6, r"^problem 's0' has 7 tokens but max_length is 6, raise it or leave the problem out$"),
        (("a", " "), 1, r"^max_length is 1, a window needs at least 2 tokens$"),
        (("abc", ""), 50, r"^sample 's0' has no tokens to score$"),
    ],
    ids=["too-long", "no-room", "empty-target"],
)
def test_refusals(tokenizer, sample_set, text, max_length, message):
    with pytest.raises((Refused, InputError), match=message):
        encode(tokenizer, sample_set(text), max_length=max_length)


def test_a_problem_that_just_fits(tokenizer, sample_set):
    (found,) = encode(tokenizer, sample_set(("abcdef", "gh")), max_length=7)
    assert len(found.windows[0].ids) == 8
