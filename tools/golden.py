"""Golden values in small text files: compare them with what the code gives now, or renew them.

    python tools/golden.py check [NAME ...]
    python tools/golden.py renew NAME ...

A change that renews one says why in its commit message; a refactor renews none.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[1] / "tests" / "golden"
RELATIVE = 1e-3
"""Kernels differ between processors; a changed method moves a loss by more than this."""


def schedule(num_stages: int, wrong: frozenset[int]) -> str:
    """The grid of 12 tokens with wrong drafts at some positions."""
    from megatron_spd.schedule.simulate import simulate
    from megatron_spd.schedule.trace import grid

    run = simulate(
        num_stages,
        12,
        target=lambda position: position,
        # the machine's position p of a text is p + 1
        drafter=lambda position: -1 if position in wrong else position,
    )
    return grid(run.trace) + "\n"


def tree_eal() -> str:
    """EAL of trees by stages, repairs and nodes a wave; top-1..4 agreement .80 .89 .92 .94."""
    from megatron_spd.schedule.simulate import simulate_tree

    lines = ["n   repairs  W=1    W=2    W=4    W=8"]
    for num_stages, repairs in product((4, 8, 16), (False, True)):
        runs = [
            simulate_tree(
                num_stages, 1000, width, agreement=(0.80, 0.89, 0.92, 0.94), seed=3, repairs=repairs
            )
            for width in (1, 2, 4, 8)
        ]
        cells = [f"{num_stages * run.committed / run.cycles:<5.3f}" for run in runs]
        lines.append("  ".join([f"{num_stages:<2}", f"{'on' if repairs else 'off':<7}", *cells]))
    return "\n".join(lines) + "\n"


def losses() -> str:
    """Loss and agreement of 20 steps of a tiny module over a tiny random target."""
    import torch

    from megatron_spd import comm
    from megatron_spd.config import TrainOptions
    from megatron_spd.model.stage import TargetStage
    from megatron_spd.speculation.config import ModuleConfig
    from megatron_spd.speculation.module import SpeculationModule
    from megatron_spd.stage_plan import StagePlan
    from megatron_spd.target_spec import RopeSpec, TargetSpec
    from megatron_spd.training.data import PackedText
    from megatron_spd.training.distill import Distillation, row_loss_of
    from megatron_spd.training.loop import distill
    from megatron_spd.training.pipeline import StreamedStage, start_pipeline

    plan, cut = (
        StagePlan.from_bounds((0, 1, 3, 4)),
        StagePlan.from_bounds((0, 4), taps=(0, 1, 3, 4)),
    )
    shape = {
        "hidden_size": 16,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 4,
        "intermediate_size": 24,
        "vocab_size": 32,
        "norm_eps": 1e-5,
        "rope": RopeSpec(rope_type="default", theta=10000.0),
    }
    comm.init_local()
    start_pipeline(cut)
    torch.manual_seed(0)
    stage = TargetStage(
        TargetSpec(
            **shape, num_layers=4, tied=False, max_positions=64, dtype="float32", bos_id=1,
            eos_ids=(2,),
        ),
        cut,
        0,
        torch.float32,
    )  # fmt: skip
    module = SpeculationModule(
        ModuleConfig(
            **shape, num_layers=1, aggregator="shared", head="linear", draft_vocab_size=32,
            bounds=plan.bounds, taps=plan.taps,
        ),
        plan,
    )  # fmt: skip
    module.init_from_target(stage.output.weight, stage.final_norm.weight)
    generator = torch.Generator().manual_seed(1)
    rows = torch.randint(0, 32, (40, 24), generator=generator).tolist()
    lines: list[str] = []
    with tempfile.TemporaryDirectory() as output:
        options = TrainOptions(
            data="", output=output, num_steps=20, micro_batch_size=4, sequence_tokens=24,
            learning_rate=1e-2, num_warmup_steps=5,
        )  # fmt: skip
        distill(
            StreamedStage(stage, cut, 0, 16),
            Distillation(module, row_loss_of(module, stage.logits, "blend"), num_stages=3),
            PackedText(rows, sequence_tokens=24, seed=0),
            options,
            plan=plan,
            on_step=lambda report: lines.append(f"{report.step} {report.loss:.6f}"),
        )
    return "\n".join(lines) + "\n"


MAKERS: dict[str, Callable[[], str]] = {
    "schedules/n4_reject_at_7.txt": lambda: schedule(4, frozenset({7})),
    "schedules/n3_reject_at_2_3_6.txt": lambda: schedule(3, frozenset({2, 3, 6})),
    "schedules/n2_all_accepted.txt": lambda: schedule(2, frozenset()),
    "schedules/tree_eal.txt": tree_eal,
    "losses/tiny_20_steps.txt": losses,
}


def same(golden: str, found: str) -> bool:
    """Word for word; words that are decimal fractions to `RELATIVE`."""
    pairs = [
        (a.split(), b.split()) for a, b in zip(golden.split("\n"), found.split("\n"), strict=False)
    ]
    return golden.count("\n") == found.count("\n") and all(
        len(left) == len(right) and all(map(_same_word, left, right)) for left, right in pairs
    )


def _same_word(left: str, right: str) -> bool:
    if "." in left and "." in right and left != ".":
        return math.isclose(float(left), float(right), rel_tol=RELATIVE)
    return left == right


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("action", choices=["check", "renew"])
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(MAKERS))
    arguments = parser.parse_args(argv)
    unknown = [name for name in arguments.names if name not in MAKERS]
    if unknown or (arguments.action == "renew" and not arguments.names):
        parser.error(f"name some of {', '.join(MAKERS)}; got {unknown or 'none'}")
    differing = 0
    for name in arguments.names or MAKERS:
        found, path = MAKERS[name](), FOLDER / name
        if arguments.action == "renew":
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(found, encoding="ascii")
        elif not path.exists() or not same(path.read_text(encoding="ascii"), found):
            differing += 1
            sys.stdout.write(f"{name} differs; now it is\n{found}")
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
