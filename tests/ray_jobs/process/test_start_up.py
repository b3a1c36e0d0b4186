"""The process of a stage reads its --spec, checks it and gives up in a moment; only workers wait for torch."""

import subprocess
import sys


def test_no_stage_imports_torch_or_ray_before_it_computes() -> None:
    code = (
        "import sys, ray_jobs.pretrain, ray_jobs.finetune, ray_jobs.evaluate, ray_jobs.baselines;"
        "print(*{'torch', 'ray', 'deepspeed', 'sklearn'} & sys.modules.keys())"
    )
    imported = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert imported.stdout.split() == []
