"""The recipes of docs/extending.md: what its code blocks say, and a copy of the source with all of them applied.

Run as a program in that copy, it performs the recipes and writes what came of it as JSON.
"""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "extending.md"
HEADING = re.compile(r"^## (.+)$", re.MULTILINE)
BLOCK = re.compile(r'^```(\w+) title="([^"]+)"\n(.*?)^```$', re.MULTILINE | re.DOTALL)
ROW = re.compile(r"^\| \[([^\]]+)\]\(#([\w-]+)\) \| (\d+) \| (\d+) \|", re.MULTILINE)
TINY = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --num-experts 4 --moe-router-topk 2 "
    "--moe-ffn-hidden-size 24 --vocab-size 64 --max-position-embeddings 32 --seq-length 32 --params-dtype fp32 "
    "--micro-batch-size 2 --global-batch-size 4 --lr 3e-3 --lr-warmup-iters 0 --train-iters 3 --eval-interval 100 "
    "--save-interval 100 --device cpu --log-interval 1"
).split()
FAMILY = (
    "--model-family laguna --qk-layernorm-scope head --num-query-groups 2 --moe-shared-expert-intermediate-size 24 "
    "--moe-router-score-function sigmoid --moe-router-norm-topk-prob --moe-router-enable-expert-bias "
    "--device-peak-tflops 0.001"
)
SPLIT = "--tensor-model-parallel-size 2"


@dataclasses.dataclass(frozen=True)
class Block:
    """One code block: a new file, or lines added to one."""

    path: str
    text: str
    is_diff: bool

    @property
    def lines_added(self) -> int:
        return sum(line.startswith("+") for line in self.text.splitlines()) if self.is_diff else 0

    def apply(self, root: Path) -> None:
        """Writes the file, or replaces the block's old lines, which must be in it once, by its new ones."""
        path = root / self.path
        if not self.is_diff:
            assert not path.exists(), f"{self.path} is no new file"
            path.parent.mkdir(exist_ok=True)
            path.write_text(self.text, encoding="utf-8")
            return
        lines = self.text.splitlines(keepends=True)
        assert all(line[0] in " +-" for line in lines), f"{self.path}: a line of the block begins with none of ' +-'"
        old, new = ("".join(line[1:] for line in lines if line[0] != other) for other in "+-")
        text = path.read_text(encoding="utf-8")
        found = text.count("\n" + old)
        assert found == 1, f"{self.path} has the lines {found} times that the page adds to:\n{old}"
        path.write_text(text.replace("\n" + old, "\n" + new), encoding="utf-8")


def recipes() -> dict[str, list[Block]]:
    """The blocks of each section that has any, by its heading."""
    _, *parts = HEADING.split(PAGE.read_text(encoding="utf-8"))
    sections = zip(parts[::2], parts[1::2], strict=True)
    found = {
        title: [Block(path, text, kind == "diff") for kind, path, text in BLOCK.findall(body)]
        for title, body in sections
    }
    return {title: blocks for title, blocks in found.items() if blocks}


def extended_copy(folder: Path) -> Path:
    """A copy of the packages and of what the recipes touch besides, with every recipe applied."""
    for package in ("megatron", "deepspeed_ext"):
        shutil.copytree(ROOT / package, folder / package)
    helpers = ("tests/__init__.py", "tests/helpers.py", "tests/preload.py")
    for name in (*helpers, "tests/packaging/__init__.py", "tests/packaging/recipes.py"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, folder / name)
    blocks = [block for section in recipes().values() for block in section]
    for path in {block.path for block in blocks if block.path.startswith("tests/")}:
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / path, folder / path)
    for block in blocks:
        block.apply(folder)
    return folder


# ---- in the copy


def main(folder: Path) -> None:
    """Performs the recipes; ``folder`` has the data and gets the runs."""
    import deepspeed_ext
    import megatron.optimus.pretrain
    from megatron.optimus.convert import convert
    from tests.helpers import run_distributed

    sources = [str(Path(str(module.__file__)).resolve()) for module in (deepspeed_ext, megatron.optimus.pretrain)]
    runs = {
        "all-gather": _train(folder, "all-gather", "--moe-token-dispatcher-type allgather"),
        "plain": _train(folder, "plain", "--moe-token-dispatcher-type plain"),
        "float8": _train(folder, "float8", "--model-converters float8_emulation"),
        "signum": _train(folder, "signum", "--optimizer signum"),
        "family": _train(folder, "family", FAMILY, ranks=1),
        "family, split": _train(folder, "family, split", f"{FAMILY} {SPLIT} --exit-interval 2", ranks=2),
        "family, resumed": _train(folder, "family, split", FAMILY, ranks=1),
        "dry run": _run("pretrain", 1, "--preset", "mula-2b", "--dry-run"),
    }
    has_hf = (folder / "mistral").exists()
    for name in ("mistral", "laguna") if has_hf else ():
        convert(folder / name, folder / f"{name}, ours", to="optimus", verify=True)
    convert(folder / "family, split" / "checkpoints", folder / "exported", to="hf", verify=True)
    convert(folder / "exported", folder / "exported, ours", to="optimus", verify=True)
    optimizers = {name: run_distributed(optimizer_steps, 2, name)[0] for name in ("Signum", "Normalized")}
    results = {
        "sources": sources,
        "runs": runs,
        "optimizers": optimizers,
        "family": _family(),
        "planned": _planned(),
        "plan": _plan(),
        "logits": {name: _logits(folder / name) for name in ("mistral", "laguna", "exported")} if has_hf else {},
    }
    (folder / "results.json").write_text(json.dumps(results))


def _run(module: str, ranks: int, *words: str) -> dict[str, Any]:
    from tests.helpers import start_program

    done = start_program(f"megatron.optimus.{module}", list(words), ranks, timeout=60)
    return {"code": done.returncode, "out": done.stdout, "err": done.stderr[-3000:]}


def _train(folder: Path, name: str, options: str, ranks: int = 2) -> dict[str, Any]:
    files = ["--run-dir", str(folder / name), "--data-path", str(folder / "counting")]
    return _run("pretrain", ranks, *TINY, *files, "--expert-model-parallel-size", str(ranks), *options.split())


OPTIMIZER_STEPS = 3
HF_TOKENS = 20
LR = 0.01


def optimizer_model() -> Any:
    import torch

    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(8, 16, bias=False), torch.nn.Tanh(), torch.nn.Linear(16, 4, bias=False))


def optimizer_input(step: int, rank: int) -> Any:
    import torch

    return torch.randn(5, 8, generator=torch.Generator().manual_seed(10 * step + rank))


def optimizer_steps(rank: int, world_size: int, name: str) -> list[list[float]]:
    """Weights after some steps of deepspeed_ext with the optimizer that its configuration names."""
    import deepspeed_ext

    config = {
        "train_micro_batch_size_per_gpu": 5,
        "gradient_clipping": 0,
        "optimizer": {"type": name, "params": {"lr": LR}},
        "zero_optimization": {"stage": 1},
        "steps_per_print": 10**9,
    }
    engine, *_ = deepspeed_ext.initialize(model=optimizer_model(), config=config)
    for step in range(OPTIMIZER_STEPS):
        engine.backward(engine(optimizer_input(step, rank)).square().mean())
        engine.step()
    return [parameter.detach().flatten().tolist() for parameter in engine.module.parameters()]


def _plan() -> str:
    """What ``optimus plan`` prints of the family on two ranks, in a process of its own; and whether it needed torch."""
    words = [*TINY, *FAMILY.split(), *SPLIT.split(), "--expert-model-parallel-size", "2", "--world-size", "2"]
    code = f"import sys; from megatron.optimus.cli import main; assert main(['plan', *{words}]) == 0; "
    code += "print('torch' in sys.modules)"
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60).stdout


def elements_of_ranks(rank: int, world_size: int) -> int:
    """Elements that this rank has of the family's model, split as SPLIT says."""
    import torch

    from megatron.optimus.config.load import load
    from megatron.optimus.models.decoder import Decoder
    from megatron.optimus.parallel.apply import parallelize
    from megatron.optimus.platform.mesh import Mesh

    config = load([*TINY, *FAMILY.split(), *SPLIT.split(), "--expert-model-parallel-size", "2"]).config
    with torch.device("meta"):
        model = Decoder(config.model)
    parallelize(model, Mesh(config.parallel, rank=rank, world_size=world_size), config.parallel, 32)
    return sum(parameter.numel() for parameter in model.parameters())


def _bytes_kept(name: str, words: list[str]) -> int:
    """Bytes a token that one attention of a family keeps for its backward."""
    import torch

    from megatron.optimus.config.family import build_part, family_of
    from megatron.optimus.config.load import load
    from megatron.optimus.layers.rope import rope_table

    config = load([*words, "--model-family", name]).config.model
    attention = build_part(family_of(config).attention, config)
    kept = {}

    def pack(x: torch.Tensor) -> torch.Tensor:
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        attention(torch.randn(2, 32, config.hidden_size), rope_table(32, config, torch.device("cpu")))
    for weight in attention.parameters():
        kept.pop(weight.untyped_storage().data_ptr(), None)
    return sum(storage.nbytes() for storage in kept.values()) // 64


def _family() -> dict[str, Any]:
    """What the family declares, and what is so: parameters, elements of a rank, bytes of a token, FLOPs of a token."""
    import torch

    from megatron.optimus.config.costs import flops_per_token
    from megatron.optimus.config.family import family_of
    from megatron.optimus.config.load import load
    from megatron.optimus.config.rank_plan import rank_plans
    from megatron.optimus.models.decoder import Decoder
    from megatron.optimus.models.parameters import num_parameters, parameters
    from tests.helpers import run_distributed

    words = [*TINY, *FAMILY.split()]
    config = load(words).config.model
    split = load([*words, *SPLIT.split(), "--expert-model-parallel-size", "2"]).config
    with torch.device("meta"):
        model = Decoder(config)
    return {
        "declared": list(parameters(config)),
        "real": [name for name, _ in model.named_parameters()],
        "elements of ranks": [[num_parameters(rank_plans(split, 2)[0])] * 2, run_distributed(elements_of_ranks, 2)],
        "bytes declared": family_of(config).attention_kept(config, 4),
        "bytes kept": {name: _bytes_kept(name, words) for name in ("laguna", "decoder")},
        "flops": flops_per_token(config, 32),
        "flops of the decoder": flops_per_token(dataclasses.replace(config, model_family="decoder"), 32),
    }


def _planned() -> list[int]:
    """Rows that the planner takes experts to be given by the new dispatcher, and by all-gather."""
    from megatron.optimus.config.load import load
    from megatron.optimus.config.rank_plan import rank_plans
    from megatron.optimus.moe.traffic import dispatcher_traffic

    words = [*TINY, "--expert-model-parallel-size", "2", "--moe-token-dispatcher-type"]
    plans = [rank_plans(load([*words, kind]).config, 2)[0] for kind in ("plain", "allgather")]
    return [dispatcher_traffic(plan).rows(plan) for plan in plans]


def _logits(folder: Path) -> list[Any]:
    """The logits of the model that ``folder`` was converted to, for tokens 0 to HF_TOKENS - 1."""
    import torch

    from megatron.optimus.checkpoint import load, load_manifest, model_slices
    from megatron.optimus.config.serialize import from_dict
    from megatron.optimus.models.decoder import Decoder

    ours = folder.with_name(f"{folder.name}, ours")
    model = Decoder(from_dict(load_manifest(ours).config).model)
    load(ours, model_slices(model, dense=True, experts=True))
    with torch.no_grad():
        logits_BSV = model(torch.arange(HF_TOKENS)[None]).logits_BSV
    assert logits_BSV is not None
    return logits_BSV.tolist()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
