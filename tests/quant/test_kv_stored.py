"""From a checkpoint to one with a quantized KV cache and back: scales, config.json, and everything that is refused."""

import json
import shutil

import pytest
import torch
from compressed_tensors.quantization import QuantizationConfig
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from compress.checkpoint import Checkpoint
from compress.errors import CheckpointError, InputError, RecipeError, Refused
from compress.writer import write_json
from quant.formats import make_format
from quant.kv.calibrate import find_scales, observe_texts
from quant.kv.config import EMULATED, kv_scheme_of
from quant.kv.options import KvCache
from quant.kv.plan import plan_kv_cache, write_kv_cache
from quant.kv.schemes import make_scheme
from quant.loader import load_model

TEXTS = ["The quick brown fox jumps over the lazy dog.", "0123456789 " * 4, "Another text, which is also read."]
TOKENS = torch.randint(3, 90, (2, 40), generator=torch.Generator().manual_seed(0))
ATTENTION = "model.layers.{}.self_attn"
SERVED = {"fp8": make_scheme("fp8"), "fp8-head": make_scheme("fp8", granularity="head")}
DYNAMIC = {name: make_scheme(name) for name in ("int8", "int4", "int4-token", "nvfp4")}


def write(source, scheme, out, scales=None, texts=TEXTS):
    """The stage without its surroundings; `scales` replace some."""
    checkpoint = Checkpoint.open(source)
    plan = plan_kv_cache(checkpoint, scheme, max_shard_size=10**9)
    found = find_scales(plan, texts, max_tokens=64, device=torch.device("cpu"))
    out.mkdir()
    write_kv_cache(plan, out, found | (scales or {}), lambda _: None)
    write_json(out / "config.json", plan.config)
    for file in checkpoint.side_files:
        shutil.copy(source / file, out / file)
    return out


@pytest.fixture
def source(tiny_float32):
    return tiny_float32("llama")


def logits(model, **options):
    with torch.inference_mode():
        return model(TOKENS, **options).logits


def edit(directory, change=None, **tensors):
    """Change config.json in place and tensors by name; None removes one."""
    stored = load_file(directory / "model.safetensors") | tensors
    stored = {name: tensor for name, tensor in stored.items() if tensor is not None}
    save_file(stored, directory / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    (change or (lambda _: None))(config)
    (directory / "config.json").write_text(json.dumps(config))
    return directory


@pytest.mark.parametrize("scheme", SERVED.values(), ids=SERVED)
def test_scales_are_the_largest_magnitude_over_448(scheme, source, tmp_path):
    out = write(source, scheme, tmp_path / "out")
    tensors = load_file(out / "model.safetensors")
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    tokenizer = load_model(source).tokenizer
    largest = {}
    for text in TEXTS:
        with torch.inference_mode():
            cache = model(**tokenizer(text, truncation=True, max_length=64, return_tensors="pt")).cache
        for i, layer in enumerate(cache.layers):
            for side, x in (("k_scale", layer.keys), ("v_scale", layer.values)):
                largest.setdefault((i, side), []).append(x.abs().amax((0, 2, 3)))
    for (i, side), found in largest.items():
        scale = tensors[f"{ATTENTION.format(i)}.{side}"]
        absmax = torch.stack(found).amax(0)
        wanted = absmax[:, None, None] if scheme.name != "fp8" or scale.ndim == 3 else absmax.amax()[None]
        assert scale.dtype == torch.float32 and scale.shape == scheme.scale_shape(2)
        torch.testing.assert_close(scale, wanted / 448)
    assert len(tensors) == len(load_file(source / "model.safetensors")) + 4


@pytest.mark.parametrize("scheme", (SERVED | DYNAMIC).values(), ids=SERVED | DYNAMIC)
def test_weights_are_carried_over_and_the_loader_emulates_the_cache(scheme, source, tmp_path):
    out = write(source, scheme, tmp_path / "out")
    before, after = load_file(source / "model.safetensors"), load_file(out / "model.safetensors")
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    loaded, plain = load_model(out), load_model(source)
    assert plain.kv is None and loaded.kv.scheme.options == scheme.options
    exact, found = logits(plain.model), logits(loaded.model)
    assert not torch.equal(exact, found)
    with torch.inference_mode():
        explicit = plain.model(TOKENS, cache=loaded.kv.make_cache()).logits
    assert torch.equal(found, explicit)


def test_config_of_a_served_scheme_is_compressed_tensors_own(source, tmp_path):
    config = json.loads((write(source, SERVED["fp8"], tmp_path / "out") / "config.json").read_text())
    block = config["quantization_config"]
    assert (block["format"], block["config_groups"]) == ("dense", {})
    read = QuantizationConfig(**block).kv_cache_scheme
    assert (read.num_bits, read.type, read.strategy, read.symmetric, read.dynamic) == (
        8,
        "float",
        "tensor",
        True,
        False,
    )


def test_a_scheme_that_is_only_emulated_survives_being_saved_again(source, tmp_path):
    out = write(source, make_scheme("int4", residual=64), tmp_path / "out")
    wanted = {"scheme": "int4", "group_size": 32, "residual": 64}
    assert json.loads((out / "config.json").read_text())[EMULATED] == wanted
    AutoConfig.from_pretrained(out).save_pretrained(tmp_path / "again")
    assert kv_scheme_of(json.loads((tmp_path / "again/config.json").read_text())).residual == 64


@pytest.mark.parametrize("scheme", [SERVED["fp8"], DYNAMIC["int4"]], ids=["fp8", "int4"])
def test_transformers_own_loader_ignores_the_scheme(scheme, source, tmp_path):
    """Why the loader here emulates the cache: theirs computes with an exact one, without an error."""
    out = write(source, scheme, tmp_path / "out")
    theirs = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    exact = logits(load_model(source).model)
    assert torch.equal(logits(theirs), exact)
    generated = theirs.generate(
        TOKENS, max_new_tokens=5, do_sample=False, output_logits=True, return_dict_in_generate=True
    )
    torch.testing.assert_close(generated.logits[0], exact[:, -1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["fp8", "int4"])
def test_after_weights_were_quantized(name, quantized, tmp_path):
    fmt = make_format(name, **({"group_size": 32} if name == "int4" else {}))
    weights = quantized("llama", fmt)
    out = write(weights, SERVED["fp8"], tmp_path / "out")
    block = json.loads((out / "config.json").read_text())["quantization_config"]
    assert (
        block["config_groups"]
        == json.loads((weights / "config.json").read_text())["quantization_config"]["config_groups"]
    )
    assert block["kv_cache_scheme"]["num_bits"] == 8
    loaded = load_model(out)
    assert loaded.formats == {name: 14} and loaded.kv.scheme.name == "fp8"
    assert not torch.equal(logits(loaded.model), logits(load_model(weights).model))


def test_bitsandbytes_weights_have_no_way_to_say_it(quantized):
    checkpoint = Checkpoint.open(quantized("llama", make_format("nf4")))
    with pytest.raises(
        RecipeError, match=r"^bitsandbytes weights cannot be combined with a KV-cache scheme: use another"
    ):
        plan_kv_cache(checkpoint, SERVED["fp8"], max_shard_size=10**9)
    assert plan_kv_cache(checkpoint, DYNAMIC["int8"], max_shard_size=10**9).config[EMULATED] == {"scheme": "int8"}


def test_quantized_twice(source, tmp_path):
    out = write(source, SERVED["fp8"], tmp_path / "out")
    with pytest.raises(
        RecipeError, match=r"^the KV cache is quantized already, to fp8 \(granularity tensor\): give the"
    ):
        plan_kv_cache(Checkpoint.open(out), DYNAMIC["int8"], max_shard_size=10**9)


def test_cast_needs_no_texts(source, tmp_path):
    out = write(source, SERVED["fp8-head"], tmp_path / "out", texts=None)
    scales = [tensor for name, tensor in load_file(out / "model.safetensors").items() if name.endswith("_scale")]
    assert len(scales) == 4 and all(torch.equal(scale, torch.ones(2, 1, 1)) for scale in scales)


def test_bytes_per_token(source):
    for scheme, bits in ((SERVED["fp8"], 8), (DYNAMIC["int8"], 9), (DYNAMIC["int4"], 5), (DYNAMIC["nvfp4"], 4.5)):
        plan = plan_kv_cache(Checkpoint.open(source), scheme, max_shard_size=10**9)
        assert plan.token_bytes(plan.layers[0]) == (2 * 2 * 32 * 2, 2 * 2 * 32 * bits / 8)


@pytest.mark.parametrize("value", [0.0, -0.5, float("nan"), float("inf")], ids=str)
def test_scales_that_are_no_positive_number(value, source, tmp_path):
    name = f"{ATTENTION.format(1)}.v_scale"
    with pytest.raises(Refused, match=rf"^{name} is {value}, not a positive number: it is not written$"):
        write(source, SERVED["fp8"], tmp_path / "bad", {name: torch.tensor([value])}, texts=None)
    out = edit(write(source, SERVED["fp8"], tmp_path / "out", texts=None), **{name: torch.tensor([value])})
    with pytest.raises(CheckpointError, match=rf"^{name} is {value}, not a positive number: the KV cache would be"):
        load_model(out)


def test_missing_scales(source, tmp_path):
    out = edit(write(source, SERVED["fp8"], tmp_path / "out"), **{f"{ATTENTION.format(1)}.k_scale": None})
    with pytest.raises(
        CheckpointError, match=r"^1 of 4 KV-cache scales are missing, first model.layers.1.self_attn.k_sc"
    ):
        load_model(out)


def test_scales_of_layers_that_are_not_there(source, tmp_path):
    out = edit(write(source, SERVED["fp8"], tmp_path / "out"), **{f"{ATTENTION.format(7)}.k_scale": torch.ones(1)})
    with pytest.raises(CheckpointError, match=r"^there are KV-cache scales for layers \[7\], which have no KV cache$"):
        load_model(out)


def test_scales_without_a_scheme(source, tmp_path):
    out = edit(write(source, DYNAMIC["int8"], tmp_path / "out"), **{f"{ATTENTION.format(0)}.k_scale": torch.ones(1)})
    with pytest.raises(
        CheckpointError, match=r"k_scale is a KV-cache scale, but config.json has no kv_cache_scheme for"
    ):
        load_model(out)


def test_scales_of_another_shape_or_kind(source, tmp_path):
    name = f"{ATTENTION.format(0)}.k_scale"
    out = edit(write(source, SERVED["fp8"], tmp_path / "out"), **{name: torch.ones(2, 1, 1)})
    with pytest.raises(
        CheckpointError, match=r"^model.layers.0.self_attn.k_scale is \[2, 1, 1\], but fp8 \(granularity ten"
    ):
        load_model(out)
    edit(out, **{name: torch.ones(1), f"{ATTENTION.format(0)}.q_scale": torch.ones(1)})
    with pytest.raises(
        CheckpointError, match=r"q_scale is a scale that no emulated KV cache uses: the checkpoint is not"
    ):
        load_model(out)


def test_scales_under_the_projections_names_are_read_once(source, tmp_path):
    """Other tools write them on the projections; engines take either."""
    out = write(source, SERVED["fp8"], tmp_path / "out")
    scale = load_file(out / "model.safetensors")[f"{ATTENTION.format(0)}.k_scale"]
    wanted = logits(load_model(out).model)
    edit(out, **{f"{ATTENTION.format(0)}.k_scale": None, f"{ATTENTION.format(0)}.k_proj.k_scale": scale})
    assert torch.equal(logits(load_model(out).model), wanted)
    edit(out, **{f"{ATTENTION.format(0)}.k_scale": scale})
    with pytest.raises(CheckpointError, match=r"are scales of the same keys: keep one of them$"):
        load_model(out)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda c: c.update({EMULATED: {"scheme": "int9"}}),
            r"^config.json has emulated_kv_cache .* scheme 'int9' is",
        ),
        (lambda c: c.update({EMULATED: {}}), r"^config.json has emulated_kv_cache {}, which is not read: 'scheme'$"),
        (lambda c: c.update({EMULATED: 3}), r"^config.json has emulated_kv_cache 3, which is not read: "),
        (
            lambda c: c.update(
                {
                    EMULATED: {"scheme": "int8"},
                    "quantization_config": {
                        "quant_method": "compressed-tensors",
                        "kv_cache_scheme": SERVED["fp8"].arguments,
                    },
                }
            ),
            r"^config.json has a kv_cache_scheme and emulated_kv_cache: remove one of them$",
        ),
        (
            lambda c: c.update(
                {
                    "quantization_config": {
                        "quant_method": "compressed-tensors",
                        "kv_cache_scheme": {"num_bits": 4, "type": "int", "strategy": "tensor"},
                    }
                }
            ),
            r"^kv_cache_scheme {'num_bits': 4, .*} is not emulated: known are fp8 \(granularity tensor\), fp8",
        ),
        (
            lambda c: c.update({EMULATED: {"scheme": "int8"}, "kv_lora_rank": 512}),
            r" keeps a latent of 512 values \(kv_lora",
        ),
    ],
    ids=["unknown", "no-name", "no-mapping", "both", "int4-served", "mla"],
)
def test_schemes_that_are_not_read(change, message, tiny):
    with pytest.raises(CheckpointError, match=message):
        load_model(edit(tiny, change))


def test_latent_attention_is_refused_before_anything_is_written(tiny):
    edit(tiny, lambda config: config.update(kv_lora_rank=512))
    with pytest.raises(
        CheckpointError, match=r" in place of keys and values, which engines quantize in a way of their own"
    ):
        plan_kv_cache(Checkpoint.open(tiny), SERVED["fp8"], max_shard_size=10**9)


def test_a_head_dimension_that_groups_do_not_divide(source):
    with pytest.raises(
        RecipeError, match=r"^the KV cache cannot be quantized so: int4-token \(group_size 64\) needs a head"
    ):
        plan_kv_cache(Checkpoint.open(source), make_scheme("int4-token", group_size=64), max_shard_size=10**9)


def test_values_that_are_all_zero_have_no_scale(source, tmp_path):
    flat = tmp_path / "flat"
    shutil.copytree(source, flat)
    name = f"{ATTENTION.format(1)}.v_proj.weight"
    edit(flat, **{name: torch.zeros_like(load_file(source / "model.safetensors")[name])})
    with pytest.raises(
        Refused, match=r"^model.layers.1.self_attn.v_scale is 0.0, not a positive number, as no calibration"
    ):
        write(flat, SERVED["fp8"], tmp_path / "out")


def test_no_texts(source):
    with pytest.raises(InputError, match=r"^there are no calibration texts: give some, or set calibrate to cast$"):
        observe_texts(source, [], max_tokens=8, device=torch.device("cpu"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"scheme": "int8", "calibrate": "amax"},
            "scheme 'int8' finds its scales at run time: leave calibrate out",
        ),
        ({"scheme": "fp8", "group_size": 32}, "scheme 'fp8' has no option 'group_size'"),
        ({"scheme": "fp8", "calibrate": "max"}, "Input should be 'amax' or 'cast'"),
        ({"scheme": "fp8", "bits": 8}, "Extra inputs are not permitted"),
    ],
)
def test_options_that_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        KvCache(**options)


def test_options_that_calibrate():
    assert [
        KvCache(**options).calibrated
        for options in ({"scheme": "fp8"}, {"scheme": "fp8", "calibrate": "cast"}, {"scheme": "int8"})
    ] == [True, False, False]
