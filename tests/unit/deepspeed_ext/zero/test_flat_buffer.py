"""What identifies a flat buffer in files."""

from __future__ import annotations

import torch

from deepspeed_ext.zero.flat_buffer import FlatBufferKey


def test_the_text_in_checkpoint_files_stays() -> None:
    """DeepSpeed's files of earlier versions hold exactly this, and load only if it is equal."""
    dense = FlatBufferKey(0, None, torch.float32)
    assert str(dense) == (
        "FamilyKey(param_group=0, expert_group=None, dtype=torch.float32, is_tensor_replica=False, "
        "is_pipe_replica=False, is_pipe_tied=False)"
    )
    expert = FlatBufferKey(1, "ep_size_2", torch.bfloat16, is_tensor_replica=True, is_pipe_tied=True)
    assert str(expert) == (
        "FamilyKey(param_group=1, expert_group='ep_size_2', dtype=torch.bfloat16, is_tensor_replica=True, "
        "is_pipe_replica=False, is_pipe_tied=True)"
    )
