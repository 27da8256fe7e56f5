"""A MoE model of `transformers` trained by deepspeed_ext alone: torchrun --standalone --nproc-per-node 2 FILE"""

import logging

import torch
from transformers import OlmoeConfig, OlmoeForCausalLM

import deepspeed_ext

logging.basicConfig(level=logging.INFO, format="%(message)s")
deepspeed_ext.init_distributed()
torch.manual_seed(0)
sizes = {"hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
model = OlmoeForCausalLM(OlmoeConfig(vocab_size=97, num_experts=8, num_experts_per_tok=2, **sizes))
config = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_clipping": 1.0,
    "zero_optimization": {"stage": 2},
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-3, "weight_decay": 0.1}},
}
engine, optimizer, _, _ = deepspeed_ext.initialize(model=model, config=config)
for step in range(40):
    start = torch.randint(97, (4, 1), device=engine.device)
    tokens = (start + torch.arange(32, device=engine.device)) % 97  # count upwards from anywhere
    loss = engine(input_ids=tokens, labels=tokens).loss
    engine.backward(loss)
    engine.step()
    if step % 10 == 9 and engine.global_rank == 0:
        logging.info("step %d loss %.3f grad_norm %.3f", step + 1, loss.item(), engine.get_global_grad_norm())
deepspeed_ext.shutdown()
