"""From the loss of a rank, a node or the coordinator to the next step that is new, with agents on simulated nodes.

    python benchmarks/restart_nodes.py --nodes 4 --ranks-per-node 2 --times 4 --out restart_nodes_cpu.json

Nodes are processes of this machine with memory of their own (tests/integration/imitated_cluster.py); agents,
coordinator and launcher are the real ones. A tiny MoE trains with a memory checkpoint every four steps and none on
disk. In turns a rank gets SIGKILL, the coordinator does, and a whole node does and loses its memory; there is a spare
for each. ``seconds`` end with the first line of metrics.jsonl of a step that had not been done before; ``phases_s`` are
the parts of it. Agents are forked from a process that has imported everything, so ``start_s`` is not that of a real
job. Standard output is a line for each loss.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # run from a checkout, without installation

from provenance import commit  # noqa: E402

from tests.integration.conftest import TINY, write_corpus  # noqa: E402
from tests.integration.imitated_cluster import ImitatedCluster  # noqa: E402

WORDS = "--train-iters 1000000 --eval-interval 0 --save-interval 0 --memory-checkpoint-interval 4".split()
WORDS += "--max-restarts 1000 --log-interval 1000".split()


def lose(job: ImitatedCluster, what: str, number: int) -> dict[str, Any]:
    """Injects one loss and returns how the run went on."""
    host = job.attempts[-1][number % len(job.attempts[-1])]
    load, last, now = os.getloadavg()[0], job.steps()[-1]["step"], time.time()
    if what == "rank":
        os.kill(job.ranks(host)[0], signal.SIGKILL)
    elif what == "coordinator":
        os.kill(job.coordinator(), signal.SIGKILL)
    else:
        job.lose(host)
    if what == "coordinator":
        job.wait_until(lambda: job.log.read_text().count("another one takes over") > number)
    else:
        job.wait_until(lambda: any("startup_s/total" in s and s["wall_time"] > now for s in job.steps()))
    last = max(last, *(s["step"] for s in job.steps() if s["wall_time"] <= now))
    job.wait_until(lambda: any(s["step"] > last and s["wall_time"] > now for s in job.steps()))
    new = next(s for s in job.steps() if s["step"] > last and s["wall_time"] > now)
    seconds, first = new["wall_time"] - now, [s for s in job.steps() if "startup_s/total" in s][-1]
    found = {"what": what, "seconds": round(seconds, 2), "load": load}
    found["lost_steps"] = 0 if what == "coordinator" else int(last - first["step"] + 1)
    phases = {}
    if what != "coordinator":  # of rank 0: until its process begins; its start; steps that are done again
        phases["until_ranks"] = first["wall_time"] - first["startup_s/total"] - now
        phases |= {key[10:]: value for key, value in first.items() if key.startswith("startup_s/")}
        phases["steps_again"] = new["wall_time"] - first["wall_time"]
    found["phases_s"] = {key: round(value, 2) for key, value in phases.items()}
    print(
        f"{what} {number + 1}: {seconds:.2f} s to a new step, {found['lost_steps']} steps lost, load {load:.1f}",
        found["phases_s"] or "",
        flush=True,
    )
    job.wait_until(lambda: job.steps()[-1]["step"] > new["step"] + 12)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--ranks-per-node", type=int, default=2)
    parser.add_argument("--times", type=int, default=4, help="of each loss")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    hosts = [f"x{number}" for number in range(args.nodes + args.times)]
    with tempfile.TemporaryDirectory() as folder:
        tokens = write_corpus(Path(folder) / "tokens")
        began = time.time()
        with ImitatedCluster(Path(folder) / "job", hosts, Path(folder) / "run", args.ranks_per_node) as job:
            batch = 2 * args.nodes * args.ranks_per_node
            words = [*TINY, *WORDS, "--nodes", str(args.nodes), "--global-batch-size", str(batch)]
            job.launch(*words, "--data-path", str(tokens))
            job.wait_until(lambda: len(job.steps()) > 12)
            start_s = time.time() - began
            kinds = ("rank", "coordinator", "node")
            found = [lose(job, what, number) for number in range(args.times) for what in kinds]
    medians = {what: statistics.median(one["seconds"] for one in found if one["what"] == what) for what in kinds}
    print("; ".join(f"{what} {seconds:.2f} s" for what, seconds in medians.items()))
    if args.out:
        words = [word for word in sys.argv if word not in ("--out", str(args.out))]
        about = {"command": " ".join(words), "commit": commit(), "cores": os.cpu_count(), "start_s": round(start_s, 1)}
        args.out.write_text(json.dumps({**about, "median_s": medians, "losses": found}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
