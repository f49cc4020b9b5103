"""The cache against attention that rounds keys and values explicitly, query by query, without any cache."""

import pytest
import torch
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoModelForCausalLM,
    DynamicCache,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
)
from transformers.masking_utils import eager_mask

from compress.errors import Refused
from quant.kv.cache import KvEmulation, Scales
from quant.kv.schemes import make_scheme

SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "head_dim": 32,
    "max_position_embeddings": 256,
}
CONFIGS = {
    "gqa": lambda: LlamaConfig(**SIZES, num_key_value_heads=2),
    "mha": lambda: LlamaConfig(**SIZES, num_key_value_heads=4),
    "mqa": lambda: LlamaConfig(**SIZES, num_key_value_heads=1),
    "mistral": lambda: MistralConfig(**SIZES, num_key_value_heads=2, sliding_window=40),
    "gemma3": lambda: Gemma3TextConfig(
        **SIZES, num_key_value_heads=2, sliding_window=40, layer_types=["sliding_attention", "full_attention"]
    ),
}
SCHEMES = {
    "fp8": make_scheme("fp8"),
    "fp8-head": make_scheme("fp8", granularity="head"),
    "int8": make_scheme("int8"),
    "int4": make_scheme("int4"),
    "int4-token": make_scheme("int4-token"),
    "nvfp4": make_scheme("nvfp4"),
}
EXPLICIT = "explicitly_rounded"


def explicit_attention(module, query, key, value, mask, *, scaling, **_):
    """softmax(q k^T) v for one query at a time, which reads all blocks but its own rounded."""
    emulation = module.emulation
    scheme, scales = emulation.scheme, emulation.scales[module.layer_idx]
    groups = query.shape[1] // key.shape[1]
    outputs = []
    for t in range(query.shape[2]):
        end = t // scheme.residual * scheme.residual if scheme.residual else t + 1
        keys = torch.cat([scheme.keys(key[:, :, :end], scales.keys), key[:, :, end:]], 2) if end else key
        values = torch.cat([scheme.values(value[:, :, :end], scales.values), value[:, :, end:]], 2) if end else value
        scores = query[:, :, t : t + 1] @ keys.repeat_interleave(groups, 1).mT * scaling
        scores = scores + mask[:, :, t : t + 1]
        outputs.append(scores.softmax(-1) @ values.repeat_interleave(groups, 1))
    return torch.cat(outputs, 2).transpose(1, 2), None


AttentionInterface.register(EXPLICIT, explicit_attention)
AttentionMaskInterface.register(EXPLICIT, eager_mask)


def build(kind, attention="sdpa"):
    """A float64 model, whose keys differ enough between channels and tokens for rounding to show."""
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(CONFIGS[kind](), attn_implementation=attention).double().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("k_proj.weight", "q_proj.weight", "v_proj.weight", "embed_tokens.weight")):
                parameter.mul_(8)
    return model


def emulation_of(model, scheme, scale=0.02):
    shape = scheme.scale_shape(model.config.num_key_value_heads) if scheme.scale_shape else None
    both = (
        None
        if shape is None
        else torch.full(shape, scale) * torch.linspace(1, 2, torch.Size(shape).numel()).reshape(shape)
    )
    layers = range(model.config.num_hidden_layers)
    return KvEmulation(scheme, model.config, dict.fromkeys(layers, Scales(both, both)))


def explicitly(kind, scheme, ids):
    """Logits (B, T, V) without a cache."""
    model = build(kind, EXPLICIT)
    for layer in model.model.layers:
        layer.self_attn.emulation = emulation_of(model, scheme)
    with torch.inference_mode():
        return model(input_ids=ids, use_cache=False).logits


@torch.inference_mode()
def through_cache(model, emulation, ids, step=None):
    cache = emulation.make_cache()
    step = step or cache.chunk or ids.shape[1]
    parts = [model(input_ids=part, cache=cache, use_cache=True).logits for part in ids.split(step, dim=1)]
    return torch.cat(parts, 1)


def tokens(length=101, rows=2):
    """Ids from 4 on: those below are special to some configurations, and generation would mask them."""
    return torch.arange(rows * length).reshape(rows, length).mul(7919).remainder(92) + 4


@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES)
@pytest.mark.parametrize("kind", CONFIGS)
def test_equals_explicitly_rounded_attention(kind, scheme):
    ids = tokens()
    model = build(kind)
    found = through_cache(model, emulation_of(model, scheme), ids)
    torch.testing.assert_close(found, explicitly(kind, scheme, ids), rtol=1e-6, atol=1e-6)
    with torch.inference_mode():
        exact = model(input_ids=ids, use_cache=False).logits
    assert (found - exact).abs().max() > 1e-4  # or the comparison says nothing


@pytest.mark.parametrize("scheme", [SCHEMES["fp8"], SCHEMES["int4"]], ids=["fp8", "int4"])
@pytest.mark.parametrize("kind", ["gqa", "mistral", "gemma3"])
def test_generation_equals_recomputing_every_step(kind, scheme):
    model, prompt = build(kind), tokens(70, rows=1)
    out = model.generate(
        prompt,
        cache=emulation_of(model, scheme).make_cache(),
        max_new_tokens=40,
        min_new_tokens=40,
        do_sample=False,
        prefill_chunk_size=32,
        output_logits=True,
        return_dict_in_generate=True,
    )
    stepwise = torch.stack(out.logits, 1)
    whole = explicitly(kind, scheme, out.sequences[:, :-1])[:, -40:]
    torch.testing.assert_close(stepwise.double(), whole, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", CONFIGS)
def test_without_a_scheme_nothing_changes(kind):
    model, ids = build(kind), tokens()
    emulation = emulation_of(model, SCHEMES["int8"])
    emulation.scheme = None
    with torch.inference_mode():
        plain = model(input_ids=ids, cache=DynamicCache(config=model.config)).logits
        torch.testing.assert_close(model(input_ids=ids, cache=emulation.make_cache()).logits, plain, rtol=0, atol=0)


@pytest.mark.parametrize("kind", ["gqa", "mistral", "gemma3"])
def test_attached_to_a_model_nobody_can_forget_it(kind):
    model, ids = build(kind), tokens(60, rows=1)
    emulation = emulation_of(model, SCHEMES["fp8"])
    wanted = through_cache(model, emulation, ids)
    greedy = model.generate(ids, cache=emulation.make_cache(), max_new_tokens=20, do_sample=False)
    plain = model.generate(ids, max_new_tokens=20, do_sample=False, output_logits=True, return_dict_in_generate=True)
    emulation.attach(model)
    for options in ({}, {"use_cache": False}, {"cache": DynamicCache(config=model.config)}):
        torch.testing.assert_close(model(input_ids=ids, **options).logits, wanted)
    found = model.generate(ids, max_new_tokens=20, do_sample=False, output_logits=True, return_dict_in_generate=True)
    assert torch.equal(found.sequences, greedy)
    assert not torch.allclose(found.logits[0], plain.logits[0], rtol=0, atol=1e-4)
    assert emulation.statistics == {}  # only passes whose rows are known are counted


def test_another_cache_in_use_is_refused():
    model, ids = build("gqa"), tokens(8)
    cache = DynamicCache(config=model.config)
    model(input_ids=ids, cache=cache)
    emulation_of(model, SCHEMES["fp8"]).attach(model)
    with pytest.raises(Refused, match=r"^the KV cache is emulated, but the model was given a DynamicCache in use$"):
        model(input_ids=ids, cache=cache)


def test_one_long_pass_spares_only_the_newest_block():
    model, ids = build("gqa"), tokens(128, rows=1)
    emulation = emulation_of(model, SCHEMES["int4"])
    cache = emulation.make_cache()
    model(input_ids=ids[:, :100], cache=cache)
    plain = DynamicCache(config=model.config)
    model(input_ids=ids[:, :100], cache=plain)
    rounded, exact = cache.layers[0].keys, plain.layers[0].keys
    assert torch.equal(rounded[:, :, 96:], exact[:, :, 96:])
    torch.testing.assert_close(rounded[:, :, :96], SCHEMES["int4"].keys(exact[:, :, :96], None))
    model(input_ids=ids[:, 100:128], cache=cache)
    assert torch.equal(cache.layers[0].keys[:, :, :96], rounded[:, :, :96])  # nothing is rounded twice


def test_loss_grows_as_bits_shrink():
    model, ids = build("gqa"), tokens(128, rows=8)
    with torch.inference_mode():
        exact = model(input_ids=ids, use_cache=False).logits.log_softmax(-1)
    divergence = []
    for name in ("int8", "fp8", "int4", "int4-token", "nvfp4"):
        found = through_cache(model, emulation_of(model, SCHEMES[name]), ids).log_softmax(-1)
        divergence.append(float((exact.exp() * (exact - found)).sum(-1).mean()))
    assert 0 < divergence[0] < divergence[1] < divergence[2] < divergence[3]
    assert divergence[4] > divergence[2]


def test_statistics_leave_padding_out():
    model, ids = build("gqa"), tokens(50)
    padded = torch.cat([ids, torch.full_like(ids, 95)], 1)
    whole, part = (emulation_of(model, SCHEMES["fp8"]) for _ in range(2))
    for row, length in zip(ids, (50, 31), strict=True):
        model(input_ids=row[None, :length], cache=whole.make_cache([length]))
    model(input_ids=padded, cache=part.make_cache([50, 31]))
    for layer, wanted in whole.complete().items():
        found = part.complete()[layer]
        for mine, theirs in ((found.keys, wanted.keys), (found.values, wanted.values)):
            torch.testing.assert_close(mine.absmax, theirs.absmax)
            assert (mine.elements, mine.clipped) == (theirs.elements, theirs.clipped)
            assert mine.elements == 81 * 2 * 32


def test_clipped_fraction_is_that_beyond_the_last_step():
    model, ids = build("gqa"), tokens(40, rows=1)
    emulation = emulation_of(model, SCHEMES["fp8"], scale=0.001)
    cache = DynamicCache(config=model.config)
    with torch.inference_mode():
        model(input_ids=ids, cache=cache)
        model(input_ids=ids, cache=emulation.make_cache([40]))
    keys = emulation.complete()[0].keys  # the first layer's keys do not depend on the rounding
    assert keys.clipped == int((cache.layers[0].keys.abs() > 0.464).sum()) > 0


def test_a_model_that_does_not_use_the_cache_is_refused():
    model = build("gqa")
    emulation = emulation_of(model, SCHEMES["int8"])
    model(input_ids=tokens(8), use_cache=False)
    with pytest.raises(Refused, match=r"^the attention of layers \[0, 1\] passed no keys and values to the KV cache"):
        emulation.complete()


def test_a_layer_that_is_not_expected_is_refused():
    model = build("gqa")
    emulation = KvEmulation(SCHEMES["int8"], model.config, {0: Scales()})
    with pytest.raises(Refused, match=r"^layer 1 has a KV cache of its own, but no projection to keys in the"):
        model(input_ids=tokens(8), cache=emulation.make_cache())


def test_nan_that_a_cache_would_hide_is_refused():
    model = build("gqa")
    with torch.no_grad():
        model.model.layers[1].self_attn.k_proj.weight[3] = float("inf")
    emulation = emulation_of(model, SCHEMES["fp8"])
    model(input_ids=tokens(8), cache=emulation.make_cache([8, 8]))
    with pytest.raises(Refused, match=r"^the keys or values of layers \[1\] hold NaN or infinity$"):
        emulation.complete()


def test_a_window_shorter_than_the_residual_is_refused():
    model = build("mistral")
    scheme = make_scheme("int4", residual=64)
    with pytest.raises(Refused, match=r"^a sliding window of 40 tokens is no longer than the residual of 64: give a"):
        emulation_of(model, scheme).make_cache()
