"""Hugging Face transformers, peft and accelerate on one GPU."""

from __future__ import annotations

from typing import Any

import torch

from tests.corpus.setups import setup, tokens, trained

HF = ("transformers",)
SMALL = {
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def causal(config: Any, device: str, **how: Any) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_config(config, **how).to(device)


def language(config: Any, batch: int, seq_len: int, device: str, **how: Any) -> Any:
    model = causal(config, device, **how)
    ids = tokens(batch, seq_len, config.vocab_size, device)
    return trained(model, lambda: model(input_ids=ids, labels=ids).loss)


def llama_config(**changes: Any) -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(**{**SMALL, **changes})


@setup("HF Llama", "language model", seq_len=64, needs=HF)
def llama(batch: int, seq_len: int, device: str = "cuda") -> Any:
    return language(llama_config(), batch, seq_len, device)


@setup("HF Llama, eager attention", "language model", seq_len=64, needs=HF)
def llama_eager(batch: int, seq_len: int, device: str = "cuda") -> Any:
    return language(llama_config(), batch, seq_len, device, attn_implementation="eager")


@setup("HF Llama, attention_mask", "language model", seq_len=64, needs=HF)
def llama_mask(batch: int, seq_len: int, device: str = "cuda") -> Any:
    model = causal(llama_config(), device)
    ids = tokens(batch, seq_len, 512, device)
    mask = torch.ones(batch, seq_len, dtype=torch.long, device=device)
    return trained(model, lambda: model(input_ids=ids, attention_mask=mask, labels=ids).loss)


@setup("HF Llama, padded batch with masked labels", "language model", seq_len=64, needs=HF)
def llama_padded(batch: int, seq_len: int, device: str = "cuda") -> Any:
    model = causal(llama_config(), device)
    ids = tokens(batch, seq_len, 512, "cpu")
    lengths = torch.arange(batch) % 3 + seq_len - 3
    mask = (torch.arange(seq_len)[None] < lengths[:, None]).long()
    labels = ids.masked_fill(mask == 0, -100)
    inputs = {"input_ids": ids.to(device), "attention_mask": mask.to(device), "labels": labels.to(device)}
    return trained(model, lambda: model(**inputs).loss)


@setup("HF Llama, use_cache=False", "language model", seq_len=64, needs=HF)
def llama_no_cache(batch: int, seq_len: int, device: str = "cuda") -> Any:
    model = causal(llama_config(), device)
    ids = tokens(batch, seq_len, 512, device)
    return trained(model, lambda: model(input_ids=ids, labels=ids, use_cache=False).loss)


@setup(
    "HF Llama, gradient_checkpointing_enable",
    "language model",
    seq_len=64,
    needs=HF,
    beside="checkpointing keeps states of random numbers in host memory",
)
def llama_checkpointed(batch: int, seq_len: int, device: str = "cuda") -> Any:
    model = causal(llama_config(), device)
    model.gradient_checkpointing_enable()
    model.train()
    ids = tokens(batch, seq_len, 512, device)
    return trained(model, lambda: model(input_ids=ids, labels=ids).loss)


@setup("HF Llama, bf16 autocast, clipping, cosine schedule", "language model", seq_len=64, needs=HF)
def llama_autocast(batch: int, seq_len: int, device: str = "cuda") -> Any:
    from transformers import get_cosine_schedule_with_warmup

    model = causal(llama_config(), device)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    schedule = get_cosine_schedule_with_warmup(optimizer, 10, 100)
    ids = tokens(batch, seq_len, 512, device)

    def step() -> None:
        with torch.autocast(device, dtype=torch.bfloat16):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()

    return step


@setup(
    "HF Llama, flex_attention",
    "language model",
    seq_len=128,
    needs=HF,
    like_cpu=False,
    beside="flex_attention has no backward on a CPU",
)
def llama_flex(batch: int, seq_len: int, device: str = "cuda") -> Any:
    return language(llama_config(head_dim=16), batch, seq_len, device, attn_implementation="flex_attention")


@setup("HF Llama, torch.compile", "compiled", seq_len=64, needs=HF)
def llama_compiled(batch: int, seq_len: int, device: str = "cuda") -> Any:
    model = causal(llama_config(), device)
    compiled = torch.compile(model)
    ids = tokens(batch, seq_len, 512, device)
    return trained(model, lambda: compiled(input_ids=ids, labels=ids).loss)


class Texts(torch.utils.data.Dataset):
    def __init__(self, count: int, length: int) -> None:
        self.count, self.length = count, length

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Any]:
        ids = [1] * self.length
        return {"input_ids": ids, "attention_mask": [1] * self.length, "labels": ids}


def _trainer_step(batch: int, seq_len: int, device: str, **options: Any) -> Any:
    import tempfile

    from transformers import Trainer, TrainingArguments, default_data_collator

    model = causal(llama_config(), device)
    arguments = TrainingArguments(
        output_dir=tempfile.gettempdir(), per_device_train_batch_size=batch, max_steps=1, report_to=[],
        save_strategy="no", logging_strategy="no", disable_tqdm=True, use_cpu=device == "cpu", **options,
    )  # fmt: skip
    trainer = Trainer(
        model=model, args=arguments, train_dataset=Texts(4 * batch, seq_len), data_collator=default_data_collator
    )
    return trainer.train


@setup("HF Trainer", "training loop", seq_len=64, needs=("transformers", "accelerate"))
def trainer(batch: int, seq_len: int, device: str = "cuda") -> Any:
    return _trainer_step(batch, seq_len, device)


@setup(
    "HF Trainer, bf16, accumulation, checkpointing",
    "training loop",
    seq_len=64,
    needs=("transformers", "accelerate"),
    beside="checkpointing keeps states of random numbers in host memory",
)
def trainer_bf16(batch: int, seq_len: int, device: str = "cuda") -> Any:
    return _trainer_step(
        batch, seq_len, device, bf16=True, gradient_accumulation_steps=2, gradient_checkpointing=True, max_grad_norm=1.0
    )


@setup("HF Qwen2", "language model", seq_len=64, needs=HF)
def qwen2(batch: int, seq_len: int, device: str = "cuda") -> Any:
    from transformers import Qwen2Config

    return language(Qwen2Config(**SMALL), batch, seq_len, device)


@setup("HF Qwen3", "language model", seq_len=64, needs=HF)
def qwen3(batch: int, seq_len: int, device: str = "cuda") -> Any:
    from transformers import Qwen3Config

    return language(Qwen3Config(**SMALL, head_dim=16), batch, seq_len, device)


@setup("HF Mistral, sliding window", "language model", seq_len=64, needs=HF)
def mistral(batch: int, seq_len: int, device: str = "cuda") -> Any:
    from transformers import MistralConfig

    return language(MistralConfig(**SMALL, sliding_window=32), batch, seq_len, device)


@setup("HF Gemma 2", "language model", seq_len=64, needs=HF)
def gemma2(batch: int, seq_len: int, device: str = "cuda") -> Any:
    from transformers import Gemma2Config

    return language(Gemma2Config(**SMALL, head_dim=16), batch, seq_len, device)


@setup("HF Mixtral", "mixture of experts", seq_len=64, needs=HF, beside="on a CPU transformers counts tokens in float")
def mixtral(batch: int, seq_len: int, device: str = "cuda") -> Any:
    from transformers import MixtralConfig

    return language(MixtralConfig(**SMALL, num_local_experts=4), batch, seq_len, device)


@setup(
    "HF Qwen3-MoE", "mixture of experts", seq_len=64, needs=HF, beside="on a CPU transformers counts tokens in float"
)
def qwen3_moe(batch: int, seq_len: int, device: str = "cuda") -> Any:
    from transformers import Qwen3MoeConfig

    config = Qwen3MoeConfig(**SMALL, head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64)
    return language(config, batch, seq_len, device)


@setup(
    "HF DeepSeek-V3", "mixture of experts", seq_len=64, needs=HF, beside="on a CPU transformers counts tokens in float"
)
def deepseek(batch: int, seq_len: int, device: str = "cuda") -> Any:
    from transformers import DeepseekV3Config

    config = DeepseekV3Config(
        **{**SMALL, "num_key_value_heads": 4}, q_lora_rank=32, kv_lora_rank=16, qk_nope_head_dim=16, qk_rope_head_dim=8,
        v_head_dim=16, n_routed_experts=4, n_group=2, topk_group=1, num_experts_per_tok=2, moe_intermediate_size=64,
        first_k_dense_replace=1,
    )  # fmt: skip
    return language(config, batch, seq_len, device)


@setup("HF GPT-2", "language model", seq_len=64, needs=HF)
def gpt2(batch: int, seq_len: int, device: str = "cuda") -> Any:
    from transformers import GPT2Config

    return language(GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=512, attn_pdrop=0.0), batch, seq_len, device)


@setup("HF BERT, masked language model", "language model", seq_len=64, needs=HF)
def bert(batch: int, seq_len: int, device: str = "cuda") -> Any:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128, vocab_size=512,
        attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    model = BertForMaskedLM(config).to(device)
    ids = tokens(batch, seq_len, 512, device)
    mask = torch.ones(batch, seq_len, dtype=torch.long, device=device)
    return trained(model, lambda: model(input_ids=ids, attention_mask=mask, labels=ids).loss)


@setup("HF RoBERTa, classification", "language model", seq_len=64, needs=HF)
def roberta(batch: int, seq_len: int, device: str = "cuda") -> Any:
    from transformers import RobertaConfig, RobertaForSequenceClassification

    config = RobertaConfig(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128, vocab_size=512
    )
    model = RobertaForSequenceClassification(config).to(device)
    ids = tokens(batch, seq_len, 512, device)
    mask = torch.ones(batch, seq_len, dtype=torch.long, device=device)
    labels = torch.zeros(batch, dtype=torch.long, device=device)
    return trained(model, lambda: model(input_ids=ids, attention_mask=mask, labels=labels).loss)


@setup("HF T5", "language model", seq_len=64, needs=HF)
def t5(batch: int, seq_len: int, device: str = "cuda") -> Any:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4, vocab_size=512, decoder_start_token_id=0
    )
    model = T5ForConditionalGeneration(config).to(device)
    ids = tokens(batch, seq_len, 512, device)
    return trained(model, lambda: model(input_ids=ids, labels=ids).loss)


@setup("HF BART", "language model", seq_len=64, needs=HF)
def bart(batch: int, seq_len: int, device: str = "cuda") -> Any:
    from transformers import BartConfig, BartForConditionalGeneration

    config = BartConfig(
        d_model=64, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4,
        encoder_ffn_dim=128, decoder_ffn_dim=128, vocab_size=512,
    )  # fmt: skip
    model = BartForConditionalGeneration(config).to(device)
    ids = tokens(batch, seq_len, 512, device)
    mask = torch.ones(batch, seq_len, dtype=torch.long, device=device)
    return trained(model, lambda: model(input_ids=ids, attention_mask=mask, labels=ids).loss)


@setup("HF Mamba", "language model", seq_len=16, needs=HF)
def mamba(batch: int, seq_len: int, device: str = "cuda") -> Any:
    from transformers import MambaConfig

    return language(MambaConfig(hidden_size=32, num_hidden_layers=1, vocab_size=512), batch, seq_len, device)


@setup("HF Whisper", "speech", needs=HF)
def whisper(batch: int, device: str = "cuda") -> Any:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    config = WhisperConfig(
        d_model=64, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4,
        encoder_ffn_dim=128, decoder_ffn_dim=128, vocab_size=512, max_source_positions=100, pad_token_id=0,
        bos_token_id=1, eos_token_id=2, decoder_start_token_id=3,
    )  # fmt: skip
    model = WhisperForConditionalGeneration(config).to(device)
    sound = torch.randn(batch, 80, 200, device=device)
    labels = tokens(batch, 20, 512, device)
    return trained(model, lambda: model(input_features=sound, labels=labels).loss)


@setup("HF ViT", "vision", needs=HF)
def vit(batch: int, device: str = "cuda") -> Any:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128, image_size=64, patch_size=16
    )
    model = ViTForImageClassification(config).to(device)
    images = torch.randn(batch, 3, 64, 64, device=device)
    labels = torch.zeros(batch, dtype=torch.long, device=device)
    return trained(model, lambda: model(pixel_values=images, labels=labels).loss)


@setup("HF Swin", "vision", needs=HF)
def swin(batch: int, device: str = "cuda") -> Any:
    from transformers import SwinConfig, SwinForImageClassification

    config = SwinConfig(image_size=64, patch_size=4, embed_dim=24, depths=[2, 2], num_heads=[2, 4], window_size=4)
    model = SwinForImageClassification(config).to(device)
    images = torch.randn(batch, 3, 64, 64, device=device)
    labels = torch.zeros(batch, dtype=torch.long, device=device)
    return trained(model, lambda: model(pixel_values=images, labels=labels).loss)


@setup("HF CLIP", "vision and language", batch=4, needs=HF)
def clip(batch: int, device: str = "cuda") -> Any:
    from transformers import CLIPConfig, CLIPModel

    text = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
            "vocab_size": 512, "eos_token_id": 2, "bos_token_id": 1, "pad_token_id": 0}  # fmt: skip
    vision = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
              "image_size": 32, "patch_size": 8}  # fmt: skip
    model = CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=32)).to(device)
    ids = tokens(batch, 16, 512, device)
    images = torch.randn(batch, 3, 32, 32, device=device)
    return trained(model, lambda: model(input_ids=ids, pixel_values=images, return_loss=True).loss)


@setup("HF SegFormer", "vision", needs=HF)
def segformer(batch: int, device: str = "cuda") -> Any:
    from transformers import SegformerConfig, SegformerForSemanticSegmentation

    config = SegformerConfig(
        hidden_sizes=[16, 32, 40, 64], depths=[1, 1, 1, 1], num_labels=5, decoder_hidden_size=32, drop_path_rate=0.0
    )
    model = SegformerForSemanticSegmentation(config).to(device)
    images = torch.randn(batch, 3, 64, 64, device=device)
    labels = torch.zeros(batch, 64, 64, dtype=torch.long, device=device)
    return trained(model, lambda: model(pixel_values=images, labels=labels).loss)


@setup("HF ModernBERT", "language model", seq_len=64, needs=HF)
def modern_bert(batch: int, seq_len: int, device: str = "cuda") -> Any:
    from transformers import ModernBertConfig, ModernBertForMaskedLM

    config = ModernBertConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4, vocab_size=512,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, cls_token_id=1, sep_token_id=2,
    )  # fmt: skip
    model = ModernBertForMaskedLM(config).to(device)
    ids = tokens(batch, seq_len, 512, device)
    mask = torch.ones(batch, seq_len, dtype=torch.long, device=device)
    return trained(model, lambda: model(input_ids=ids, attention_mask=mask, labels=ids).loss)


@setup("LoRA with peft", "language model", seq_len=64, needs=("transformers", "peft"))
def lora(batch: int, seq_len: int, device: str = "cuda") -> Any:
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(causal(llama_config(), device), LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    ids = tokens(batch, seq_len, 512, device)
    return trained(model, lambda: model(input_ids=ids, labels=ids).loss)


@setup("accelerate, one GPU", "training loop", needs=("accelerate",), beside="a CPU holds the data set too")
def accelerated(batch: int, device: str = "cuda") -> Any:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)  # of a run on another device
    accelerator = Accelerator(mixed_precision="bf16", cpu=device == "cpu")
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 4))
    optimizer = torch.optim.AdamW(model.parameters())
    data = torch.utils.data.TensorDataset(torch.randn(4 * batch, 32), torch.zeros(4 * batch, dtype=torch.long))
    model, optimizer, loader = accelerator.prepare(model, optimizer, torch.utils.data.DataLoader(data, batch))
    batches = iter(loader)

    def step() -> None:
        inputs, labels = next(batches)
        with accelerator.accumulate(model):
            loss = torch.nn.functional.cross_entropy(model(inputs), labels)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

    return step
