"""The process of a stage reads its --spec, checks it and gives up in a moment; only workers wait for torch."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("modules", "late"),
    [
        ("pretrain, ray_jobs.finetune, ray_jobs.evaluate, ray_jobs.baselines", "torch ray deepspeed sklearn"),
        ("training.workers.process_group", "torch"),  # which Ray Train's controller imports, too
    ],
)
def test_no_stage_imports_torch_or_ray_before_it_computes(modules: str, late: str) -> None:
    code = f"import sys, ray_jobs.{modules}; print(*{set(late.split())} & sys.modules.keys())"
    imported = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert imported.stdout.split() == []
