"""Hugging Face's language models with small random configurations: masked, they compute what a dense copy with W∘M written in computes, bit for bit."""

import pytest
import torch
from models.dense_copy import check, stirred

import fxmask

pytestmark = pytest.mark.models
TOKENS = torch.randint(3, 99, (2, 12), generator=torch.Generator().manual_seed(0))
PADDING = torch.ones_like(TOKENS)
PADDING[1, 8:] = 0


@pytest.fixture(scope="module")
def made(torchvision):
    """A maker of models. transformers imports torchvision, which beside a CPU build of torch wants its shim first."""
    import transformers

    def make(model, config, **options):
        torch.manual_seed(0)
        return stirred(getattr(transformers, model)(getattr(transformers, config)(vocab_size=99, **options)))

    return make


@pytest.fixture(scope="module")
def llama(made):
    sizes = dict(num_hidden_layers=2, hidden_size=64, intermediate_size=160, num_attention_heads=4, num_key_value_heads=2, attention_dropout=0.1)
    return lambda **options: made("LlamaForCausalLM", "LlamaConfig", **sizes, **options)


def logits(model, tokens, padding):
    return model(input_ids=tokens, attention_mask=padding).logits


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_llama(llama, attention):
    model = check(llama(attn_implementation=attention), TOKENS, PADDING, call=logits)
    assert len(fxmask.masks(model)) == 2 * 7 + 1


def test_llama_generates_from_its_cache(llama):
    model = fxmask.apply(llama().eval(), ratio=0.5, block=(16, 16))
    options = dict(attention_mask=torch.ones_like(TOKENS), max_new_tokens=5, do_sample=False, pad_token_id=0)
    expected = TOKENS
    for _ in range(5):
        with torch.no_grad():
            expected = torch.cat([expected, model(input_ids=expected).logits[:, -1:].argmax(-1)], 1)
    assert torch.equal(model.generate(TOKENS, **options), expected)


def test_llama_with_a_tied_head(llama):
    model = check(llama(tie_word_embeddings=True), TOKENS, PADDING, call=logits)
    assert len(fxmask.masks(model)) == 2 * 7


def test_bert(made):
    model = made("BertForPreTraining", "BertConfig", num_hidden_layers=2, hidden_size=64, intermediate_size=160, num_attention_heads=4)

    def call(model, tokens, padding):
        y = model(input_ids=tokens, attention_mask=padding)
        return y.prediction_logits, y.seq_relationship_logits

    check(model, TOKENS, PADDING, call=call, reordered=["*.attention.self.*"])  # heads are moved in front of tokens, and so are their gradients
    assert len(fxmask.masks(model)) == 2 * 6 + 2  # six a layer, the pooler, the head's transform; the decoder is the table, the pair's head has two rows


# k's gradient has strides (tokens * features, 1, tokens) here; a product of that and one of a copy of it are split in two ways on several threads
@pytest.mark.parametrize("feed_forward", ["relu", "gated-gelu"])
def test_t5(made, feed_forward, one_thread):
    sizes = dict(d_model=64, d_kv=16, d_ff=160, num_layers=2, num_heads=4, feed_forward_proj=feed_forward)
    model = made("T5ForConditionalGeneration", "T5Config", **sizes)

    def call(model, tokens, padding):
        return model(input_ids=tokens, attention_mask=padding, decoder_input_ids=tokens[:, :5]).logits

    check(model, TOKENS, PADDING, call=call)
    assert len(fxmask.masks(model)) == 2 * (4 + 8 + 2 * (2 + (feed_forward != "relu")))


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # peft asks it of transformers
@pytest.mark.parametrize("rank", [4, 16])
def test_lora_of_peft(llama, rank):
    import peft

    config = peft.LoraConfig(r=rank, lora_alpha=8, lora_dropout=0.1, target_modules=["q_proj", "v_proj", "down_proj"])
    model = check(stirred(peft.get_peft_model(llama(), config)), TOKENS, PADDING, call=logits)
    assert len(fxmask.masks(model)) == 2 * 7 + 1
    assert not any("lora" in name for name in fxmask.masks(model))
