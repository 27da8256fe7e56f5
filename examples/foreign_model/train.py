"""Trains a transformers OLMoE with deepspeed_ext alone: torchrun --standalone --nproc-per-node 2 train.py"""

import argparse

import torch
from transformers import OlmoeConfig, OlmoeForCausalLM

import deepspeed_ext

STEPS, BATCH, LENGTH, VOCABULARY = 30, 4, 32, 64


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    deepspeed_ext.init_distributed()
    torch.manual_seed(0)  # the same weights on every rank
    shape = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = OlmoeConfig(
        vocab_size=VOCABULARY, num_experts=8, num_experts_per_tok=2, eos_token_id=0, pad_token_id=0, **shape
    )
    engine, *_ = deepspeed_ext.initialize(
        model=OlmoeForCausalLM(config),
        optimizer=lambda params: torch.optim.AdamW(params, lr=3e-3),
        config={"train_micro_batch_size_per_gpu": BATCH, "gradient_clipping": 1.0, "zero_optimization": {"stage": 2}},
        is_expert=lambda name: "ep_size_1" if ".mlp.experts." in name else None,
    )
    torch.manual_seed(engine.global_rank)  # different tokens on every rank
    for step in range(STEPS):
        start = torch.randint(VOCABULARY, (BATCH, 1), device=engine.device)
        tokens = (start + torch.arange(LENGTH, device=engine.device)) % VOCABULARY  # counting: easy to learn
        loss = engine(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        engine.step()
        if engine.global_rank == 0 and step % 5 == 4:
            norm = engine.get_global_grad_norm()
            print(f"step {step + 1} loss {loss.item():.4f} gradient norm {norm:.3f}", flush=True)


if __name__ == "__main__":
    deepspeed_ext.run_program(main)  # destroys the process groups, keeps the exit code of a failed rank
