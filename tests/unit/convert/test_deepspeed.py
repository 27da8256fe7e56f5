"""Conversion against DeepSpeed itself: what its engine writes we read, what we write it loads, bit for bit."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import pickle
import re
import shutil
import zipfile

import pytest
import torch

from megatron.optimus.checkpoint import CheckpointError, load_manifest
from megatron.optimus.config.schema import ModelConfig
from megatron.optimus.convert import Options, convert, open_source
from megatron.optimus.convert.deepspeed import named_tensors
from megatron.optimus.convert.tensor_map import assemble
from megatron.optimus.models.huggingface.config import hf_config
from megatron.optimus.models.parameters import parameter_shapes
from tests.helpers import run_distributed
from tests.unit.convert import stock_deepspeed as stock
from tests.unit.convert.test_damage import damaged, tensors_of

_EXPERTS = re.compile(r"(.*deepspeed_experts\.)(\d+)(\..*)")


def moe_config():
    s = stock.SHAPE
    return ModelConfig(
        num_layers=s["layers"],
        hidden_size=s["hidden"],
        num_attention_heads=s["heads"],
        num_query_groups=s["kv_heads"],
        vocab_size=stock.VOCAB,
        num_experts=s["experts"],
        moe_ffn_hidden_size=s["inner"],
        moe_router_topk=2,
        qk_layernorm=False,
        moe_router_norm_topk_prob=True,
    )


def config_file(tmp_path, model):
    """--model-config, in both of its forms."""
    if model.is_moe:
        (tmp_path / "config.json").write_text(json.dumps(hf_config(model, "float32")))
        return tmp_path / "config.json"
    text = "\n".join(f"  {field}: {value}" for field, value in dataclasses.asdict(model).items() if type(value) is int)
    (tmp_path / "run.yaml").write_text(f"model:\n{text}\n  qk_layernorm: false\n")
    return tmp_path / "run.yaml"


def merged(ranks, ep_size):
    """One state of the whole model from those of all ranks; experts get their global numbers."""
    whole = {}
    for kind in ranks[0]:
        whole[kind] = {}
        for rank, state in enumerate(ranks):
            for name, tensor in state[kind].items():
                match = _EXPERTS.fullmatch(name)
                if match:
                    per_rank = stock.SHAPE["experts"] // ep_size
                    number = rank % ep_size * per_rank + int(match[2])
                known = whole[kind].setdefault(f"{match[1]}{number}{match[3]}" if match else name, tensor)
                assert torch.equal(known, tensor), (kind, name, rank)  # replicas agree
    return whole


def assert_holds(source, state, names):
    """Every tensor of every kind of an opened checkpoint, under the foreign names."""
    shapes = parameter_shapes(source.model)
    tensors = named_tensors(names, source.model)
    assert source.kinds == set(state)
    for kind, expected in state.items():
        assert expected.keys() == {tensor.key for tensor in tensors}
        for tensor in tensors:
            dtype = expected[tensor.key].dtype
            found = assemble(tensor, shapes, lambda name, a, b, kind=kind: source.read(name, kind, a, b), dtype)
            assert source.dtypes[tensor.submatrices[0].name, kind] == dtype
            assert torch.equal(found, expected[tensor.key]), (kind, tensor.key)


CASES = {
    "dense-z1-bf16": ("decoder", 1, 1, "bf16"),
    "dense-z2-fp32": ("decoder", 2, 1, "fp32"),
    "moe-z1-ep2-bf16": ("moe", 1, 2, "bf16"),
    "moe-z2-ep4-fp32": ("moe", 2, 4, "fp32"),
}
_WORLD = 4


@pytest.fixture(scope="module")
def stock_runs(tmp_path_factory):
    """Folder of checkpoints that stock DeepSpeed wrote, and what every rank then held."""
    folder = tmp_path_factory.mktemp("stock")
    return folder, run_distributed(stock.write_checkpoints, _WORLD, str(folder), CASES, timeout=400)


def described(case):
    what, _, ep_size, _ = CASES[case]
    moe = what == "moe"
    return moe_config() if moe else stock.decoder_config(), "hf-native-moe" if moe else "optimus", ep_size


def test_zero_to_optimus_to_universal_and_into_deepspeed(tmp_path, stock_runs):
    """Stock runs -> ours -> universal -> stock runs on fewer ranks: masters, moments and step, exactly."""
    folder, ranks = stock_runs
    full = {}
    for case in CASES:
        model, names, ep_size = described(case)
        state = merged([rank[case] for rank in ranks], ep_size)
        config = config_file(tmp_path, model)
        with pytest.raises(CheckpointError, match=r"do not say what the model looks like.*--model-config"):
            open_source(folder / case)
        source = open_source(folder / case, config)
        assert (source.format, source.step, source.optimizer_steps) == ("zero", 3, 3)
        assert source.consumed_samples == 6 * _WORLD
        assert_holds(source, state, names)

        ours, universal = tmp_path / f"ours-{case}", tmp_path / "universal" / case
        done = convert(folder / case, ours, to="optimus", model_config=config, verify=True)
        assert done.compared == 3 * len(parameter_shapes(model))
        manifest = load_manifest(ours)
        assert (manifest.kind, manifest.step, manifest.consumed_samples) == ("full", 3, 6 * _WORLD)
        assert manifest.metadata["optimizer_step_count"] == 3
        full[case] = {kind: tensors for kind, tensors in state.items() if kind != "weight"}
        assert_holds(open_source(ours), full[case], names)
        convert(ours, universal, to="universal", options=Options(names=names), verify=True)
        assert_holds(open_source(universal), full[case], names)
        convert(universal, tmp_path / f"back-{case}", to="optimus", verify=True)
        assert_holds(open_source(tmp_path / f"back-{case}"), full[case], names)
    for loaded in run_distributed(stock.load_universal, 2, str(tmp_path / "universal"), CASES, timeout=400):
        for case, kinds in full.items():
            for kind, expected in kinds.items():
                assert loaded[case][kind].keys() == expected.keys()
                for name, tensor in expected.items():
                    assert torch.equal(loaded[case][kind][name], tensor), (case, kind, name)


@pytest.mark.parametrize("case", ["dense-z1-bf16", "moe-z2-ep4-fp32"])
def test_weights_of_a_zero_run_reach_hugging_face_and_megatron(tmp_path, stock_runs, case):
    """The bits the run computed with, not rounded masters; through every format and back."""
    folder, ranks = stock_runs
    model, names, ep_size = described(case)
    state = merged([rank[case] for rank in ranks], ep_size)
    config = config_file(tmp_path, model)
    source = folder / case
    for number, to in enumerate(("hf", "megatron", "zero", "optimus")):
        convert(source, tmp_path / to, to=to, options=Options(names=names), model_config=config, verify=True)
        source = tmp_path / to
        config = None
        assert_holds(open_source(source), {"weight": state["weight"]}, names)
        assert number or (source / "config.json").exists()
    if case.startswith("moe"):
        [loaded] = run_distributed(stock.load_module, 1, str(tmp_path / "zero"), "moe", timeout=200)
        assert loaded.keys() == state["weight"].keys()
        assert all(torch.equal(loaded[name], tensor) for name, tensor in state["weight"].items())


def copied(stock_runs, tmp_path, case):
    folder, _ = stock_runs
    shutil.copytree(folder / case, tmp_path / "run")
    return tmp_path / "run", tmp_path / "run" / "global_step3", config_file(tmp_path, described(case)[0])


def rewrite(file, change):
    content = torch.load(file, weights_only=False)
    change(content)
    torch.save(content, file)


def shorten_first_share(content):
    shares = content["optimizer_state_dict"]["single_partition_of_fp32_groups"]
    shares[0] = shares[0][:-1].clone()


def first_state(folder):
    return next(iter(sorted(folder.glob("*zero_pp_rank_0*"))))


@pytest.mark.parametrize(
    "damage, message",
    [
        (
            lambda d: next(d.glob("*pp_rank_2_*")).unlink(),
            r"saved by 4 ranks; optimizer files of ranks \[2\] are missing",
        ),
        (lambda d: next(d.glob("*pp_rank_3_*")).unlink(), r"optimizer files of ranks \[3\] are missing"),
        (
            lambda d: shutil.copyfile(first_state(d), d / first_state(d).name.replace("rank_0_", "rank_4_")),
            r"optimizer files of ranks \[4\] do not belong to it",
        ),
        (lambda d: next(d.glob("layer_1_expert_2_*")).unlink(), "lacks 3 tensors .*experts.2.w1"),
        (lambda d: (d / "mp_rank_00_model_states.pt").unlink(), "has no mp_rank_00_model_states.pt"),
        (lambda d: (d / "mp_rank_01_model_states.pt").touch(), "several mp_rank files"),
        (lambda d: (d / "zero_pp_rank_0_mp_rank_00_model_states.pt").touch(), "ZeRO stage 3 checkpoints are not read"),
        (lambda d: (d / "layer_00-model_00-model_states.pt").touch(), "pipeline engine"),
        (lambda d: (d.parent / "latest").write_text("../../etc"), "is not the plain name of a folder"),
        (
            lambda d: rewrite(d / "mp_rank_00_model_states.pt", lambda c: c["module"].update(extra=torch.zeros(2))),
            "has unexpected 1 tensors .*: extra",
        ),
        (
            lambda d: rewrite(first_state(d), lambda c: c["optimizer_state_dict"].pop("param_slice_mappings")),
            "not an optimizer file of ZeRO stage 1 or 2: 'param_slice_mappings'",
        ),
        (
            lambda d: rewrite(first_state(d), shorten_first_share),
            "not an optimizer file of ZeRO stage 1 or 2",
        ),
    ],
)
def test_wrong_zero_checkpoints_are_refused_by_name(tmp_path, stock_runs, damage, message):
    run, folder, config = copied(stock_runs, tmp_path, "moe-z1-ep2-bf16")
    damage(folder)
    with pytest.raises(CheckpointError, match=message):
        convert(run, tmp_path / "ours", to="optimus", model_config=config)
    assert not (tmp_path / "ours").exists()


class Runs:
    """Unpickling it would leave a mark."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return os.system, (f"touch {self.mark}",)


def test_pickles_with_code_are_refused_and_not_run(tmp_path, stock_runs):
    mark = tmp_path / "mark"
    for file in ("mp_rank_00_model_states.pt", "layer_0_expert_1_mp_rank_00_model_states.pt", "optimizer"):
        (tmp_path / file).mkdir()
        run, folder, config = copied(stock_runs, tmp_path / file, "moe-z1-ep2-bf16")
        target = first_state(folder) if file == "optimizer" else folder / file
        rewrite(target, lambda content: content.update(ds_config={"a": Runs(mark)}))
        with pytest.raises(CheckpointError, match=r"is refused: it names (posix|nt)\.system"):
            convert(run, tmp_path / "ours", to="optimus", model_config=config)
    assert not mark.exists() and not (tmp_path / "ours").exists()


def test_damaged_and_disguised_archives(tmp_path, stock_runs):
    run, folder, config = copied(stock_runs, tmp_path, "dense-z1-bf16")
    file = folder / "mp_rank_00_model_states.pt"
    good = file.read_bytes()

    def refused(data, message):
        file.write_bytes(data)
        with pytest.raises(CheckpointError, match=message):
            convert(run, tmp_path / "ours", to="optimus", model_config=config)
        assert not (tmp_path / "ours").exists()

    refused(good[: len(good) // 2], "cannot be read: .*damaged, or no file of torch.save.*copy it again")
    refused(b"", "cannot be read: .*damaged, or no file of torch.save.*copy it again")
    refused(pickle.dumps({"module": {}}), "cannot be read: .*damaged, or no file of torch.save.*copy it again")
    weights = torch.load(io.BytesIO(good), weights_only=False)["module"]["layers.1.mlp.up_proj.weight"]
    at = good.index(weights.contiguous().view(torch.uint8).numpy().tobytes())
    refused(good[: at + 5] + bytes([good[at + 5] ^ 4]) + good[at + 6 :], "Bad CRC-32")
    with zipfile.ZipFile(io.BytesIO(good)) as source, zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as target:
        for entry in source.infolist():
            target.writestr(entry.filename, source.read(entry))
    refused(file.read_bytes(), r"is compressed \(\d+ bytes\); torch.save does not compress")
    file.write_bytes(good)
    convert(run, tmp_path / "whole", to="optimus", model_config=config)
    states = first_state(folder)
    good_states = states.read_bytes()
    for number, data in enumerate(damaged(good_states, 0, states.stat().st_size, seed=9)):
        states.write_bytes(data)
        try:
            convert(run, tmp_path / str(number), to="optimus", model_config=config)
        except CheckpointError as error:
            assert states.name in str(error) and "\n" not in str(error)
        else:
            assert tensors_of(tmp_path / str(number)) == tensors_of(tmp_path / "whole")
    states.write_bytes(good_states)
    blobs, snapshot = tmp_path / "hub" / "blobs", tmp_path / "hub" / "snapshots" / "0a1b"
    blobs.mkdir(parents=True)
    shutil.copytree(run, snapshot)
    for number, found in enumerate(sorted(path for path in snapshot.rglob("*") if path.is_file())):
        found.rename(blobs / str(number))
        found.symlink_to(os.path.relpath(blobs / str(number), found.parent))
    convert(snapshot, tmp_path / "from the hub", to="optimus", model_config=config)
    assert tensors_of(tmp_path / "from the hub") == tensors_of(tmp_path / "whole")
    linked = snapshot / file.relative_to(run)
    outside = tmp_path / "outside" / "blobs" / "0"
    outside.parent.mkdir(parents=True)
    outside.write_bytes(good)
    for link, target in ((file, "/etc/passwd"), (linked, "/etc/passwd"), (linked, outside), (linked, blobs)):
        link.unlink()
        link.symlink_to(target)
        with pytest.raises(CheckpointError, match=r"not a regular file .*put a copy there"):
            open_source(snapshot if link == linked else run, config)
