"""transformers models whose linears are replaced: their config says so, and what they save is loaded as it was.

Nothing is downloaded; on the CPU, where transformers would dequantise, its check of the device is left out.
"""

import copy
import os

import pytest
import torch
from helpers import load_example, same_bits

from deep_tile import nn
from deep_tile.integrations import transformers as integration

os.environ["HF_HUB_OFFLINE"] = "1"  # read at import
pytest.importorskip("transformers", reason="needs transformers: pip install '.[transformers]'")

from transformers import T5Config, T5ForConditionalGeneration  # noqa: E402
from transformers.integrations import finegrained_fp8  # noqa: E402

qwen3_fp8 = load_example("qwen3_fp8")

FORMAT = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


def not_the_head(name: str, layer: torch.nn.Linear) -> bool:
    return "lm_head" not in name


def only_attention(name: str, layer: torch.nn.Linear) -> bool:
    return name.endswith(("q_proj", "o_proj"))


def everything(name: str, layer: torch.nn.Linear) -> bool:
    return True


@pytest.fixture
def installed():
    integration.install(exact="divide")
    yield
    integration.uninstall()


def t5() -> T5ForConditionalGeneration:
    sizes = {"vocab_size": 64, "d_model": 64, "d_kv": 16, "d_ff": 144, "num_layers": 2, "num_heads": 4}
    return T5ForConditionalGeneration(T5Config(**sizes, tie_word_embeddings=False)).eval()


@pytest.mark.parametrize("wanted", [not_the_head, only_attention, everything])
@pytest.mark.parametrize("experts", [False, True])
@torch.no_grad()
def test_what_is_saved_is_loaded_as_it_was(tmp_path, installed, experts, wanted):
    """FP8 where it was replaced, wide elsewhere; experts are wide. Each layer answers the same."""
    model = qwen3_fp8.random_model(experts=experts)
    shared = model.config
    assert nn.replace_linears(model, wanted) > 0
    assert FORMAT.items() <= model.config.quantization_config.items()
    assert getattr(shared, "quantization_config", None) is None  # other models may have it
    assert model.config is not shared and model.model.config is model.config
    model.save_pretrained(tmp_path)
    loaded = qwen3_fp8.load(tmp_path, "cpu")
    assert loaded.state_dict().keys() == model.state_dict().keys()
    for name, layer in model.named_modules():
        if type(layer) is nn.Linear:
            assert type(loaded.get_submodule(name)) is finegrained_fp8.FP8Linear
            x = torch.randn(3, layer.in_features).bfloat16()
            assert same_bits(loaded.get_submodule(name)(x), layer(x))
        else:
            assert not isinstance(loaded.get_submodule(name), (finegrained_fp8.FP8Linear, finegrained_fp8.FP8Experts))
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name].float(), tensor.float()), name


def test_models_within_others_say_it():
    """A part whose parent is no transformers model is named by its own names."""
    model = torch.nn.ModuleDict({"language": qwen3_fp8.random_model(), "head": torch.nn.Linear(8, 8)}).eval()
    nn.replace_linears(model, lambda name, layer: "lm_head" not in name and name != "head")
    assert model["language"].config.quantization_config == {**FORMAT, "modules_to_not_convert": ["lm_head"]}
    untouched = qwen3_fp8.random_model()
    assert nn.replace_linears(untouched, lambda name, layer: False) == 0
    assert not hasattr(untouched.config, "quantization_config")


def test_replacing_more_is_said():
    model = qwen3_fp8.random_model()
    nn.replace_linears(model, only_attention)
    before = len(model.config.quantization_config["modules_to_not_convert"])
    nn.replace_linears(model, not_the_head)
    assert before > 1 and model.config.quantization_config["modules_to_not_convert"] == ["lm_head"]


def test_a_model_that_is_quantised_otherwise_is_refused():
    model = qwen3_fp8.random_model()
    model.config.quantization_config = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    with pytest.raises(ValueError, match="quantization_config says .*bitsandbytes.*Nothing has been replaced"):
        nn.replace_linears(model)
    assert type(model.lm_head) is torch.nn.Linear


def test_names_that_end_alike_are_refused():
    """transformers leaves wide whatever ends as a name of its list does."""
    model = qwen3_fp8.random_model()
    model.model.draft_lm_head = torch.nn.Linear(8, 8)
    with pytest.raises(
        ValueError, match="'model.draft_lm_head': transformers would leave it wide along with 'lm_head'"
    ):
        nn.replace_linears(model.eval(), lambda name, layer: name != "lm_head")


def test_layers_that_transformers_keeps_wide_are_refused():
    model = qwen3_fp8.random_model()
    model._keep_in_fp32_modules = ["down_proj"]
    with pytest.raises(ValueError, match="down_proj.: transformers loads it in FP32, as _keep_in_fp32_modules"):
        nn.replace_linears(model, not_the_head)
    assert nn.replace_linears(model, lambda name, layer: not_the_head(name, layer) and "down_proj" not in name) == 12


@torch.no_grad()
def test_t5_casts_to_its_weights():
    """T5 casts inputs to a layer's dtype. Such layers stay wide, and the model runs."""
    model = t5()
    before = copy.deepcopy(model)
    with pytest.raises(ValueError, match="T5DenseActDense reads wo.weight itself") as error:
        nn.replace_linears(model)
    wanted = eval(str(error.value).rpartition("wanted=")[2])
    assert nn.replace_linears(model, wanted) > 20
    tokens = torch.randint(64, (2, 9))
    wide = before(input_ids=tokens, decoder_input_ids=tokens).logits
    assert 0 < (model(input_ids=tokens, decoder_input_ids=tokens).logits - wide).norm() / wide.norm() < 0.3


@torch.no_grad()
def test_tied_heads():
    """Tied heads are refused; others may be tied again."""
    model = qwen3_fp8.random_model(tie_word_embeddings=True)
    with pytest.raises(ValueError, match="'lm_head': its weight is that of 'model.embed_tokens.weight'"):
        nn.replace_linears(model)
    nn.replace_linears(model, not_the_head)
    model.tie_weights()
    assert model(torch.randint(512, (1, 5))).logits.isfinite().all()
