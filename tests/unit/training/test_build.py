"""What the configuration says about documents, as the loaders get it."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.optimus.config.schema import ConfigError, DataConfig, ModelConfig, Packing, RunConfig, TokenizerType
from megatron.optimus.data.errors import DataError
from megatron.optimus.data.tokenize.tokenizer import train_bpe
from megatron.optimus.training.build import _documents

SENTINELS = ["<fim_prefix>", "<fim_middle>", "<mine>"]


def run(vocab_size: int = 300, **data: object) -> RunConfig:
    return RunConfig(model=ModelConfig(vocab_size=vocab_size), data=DataConfig(**data))


def test_documents_of_a_run(tmp_path: Path) -> None:
    options, fim = _documents(run())
    assert fim is None and options.eod_id is None
    options, fim = _documents(run(reset_attention_mask=True, tokenizer_type=TokenizerType.BYTE))
    assert fim is None and options.eod_id == 256 and options.reset_attention_mask and not options.reset_position_ids
    assert _documents(run(reset_attention_mask=True, packing=Packing.BEST_FIT))[0].eod_id is None

    train_bpe(["some text"], 280, tmp_path, SENTINELS)
    own = {"tokenizer_model": str(tmp_path), "fim_rate": 0.3, "fim_suffix_token": "<mine>"}
    options, fim = _documents(run(**own))
    assert fim is not None and (fim.rate, fim.spm_rate, fim.sentinels) == (0.3, 0.5, (1, 2, 3)) and options.eod_id == 0
    with pytest.raises(DataError, match=r"fim_suffix_token='<fim_suffix>': the tokenizer .* has no such token"):
        _documents(run(**own | {"fim_suffix_token": "<fim_suffix>"}))
    with pytest.raises(DataError, match=r"fim_suffix_token='<mine>': .* as 3, outside vocab_size=3"):
        _documents(run(vocab_size=3, **own))


@pytest.mark.parametrize("name", ["fim_rate", "fim_spm_rate"])
def test_shares_are_shares(name: str) -> None:
    for value in (-0.1, 1.1, float("nan")):
        with pytest.raises(ConfigError, match=f"{name}="):
            DataConfig(**{name: value})
